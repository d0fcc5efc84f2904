"""A report's pictures in letters: the schedule, and the memory of each rank at its peak."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from merakc.ir.program import ActionKind, Event
from merakc.ir.report import RankMemory, Report
from merakc.report.charts.labels import ComputeLabel, parse_label
from merakc.report.charts.view import Axis, view
from merakc.report.units import format_bytes, format_seconds

# A letter for each part of `RankMemory.parts`, in their order.
LETTERS = "PpGOBAMT"
LEAST_COLUMNS = 20
KEY = {
    ActionKind.FORWARD: "F forward",
    ActionKind.BACKWARD: "B backward",
    ActionKind.INPUT_GRAD: "I input gradient",
    ActionKind.WEIGHT_GRAD: "W weight gradient",
    ActionKind.RECOMPUTE: "R forward again",
    ActionKind.HEAD: "H coupled loss",
    ActionKind.REDUCE: "+ reduction",
}
# Where a peak takes less of the memory than this, bars show the peak alone.
LEAST_SHARE = 1 / 8


def schedule_chart(report: Report, width: int) -> list[str]:
    """A line a rank, of `width` columns at most: `F3--` is the forward of micro-batch 3."""
    names = [f"rank {r.rank} " for r in report.ranks]
    indent = max(map(len, names))
    columns = max(width - indent - 2, LEAST_COLUMNS)
    found = view(report.timeline, columns // 3, [r.rank for r in report.ranks])
    lines = [
        f"{name:<{indent}}|{_row(events, found.axis, columns)}|"
        for name, events in zip(names, found.rows.values(), strict=True)
    ]
    end = format_seconds(found.axis.end_s)
    lines.append(f"{'':{indent}} 0{end:>{columns - 1}}")
    kinds = {e.kind for own in found.rows.values() for e in own}
    key = ", ".join(text for kind, text in KEY.items() if kind in kinds)
    lines += wrapped(f"{key}, of the micro-batch of that number; . idle", indent, width)
    if found.axis.left_out_s is not None:
        first_s, last_s = found.axis.left_out_s
        between = f"{format_seconds(first_s)} and {format_seconds(last_s)}"
        lines += wrapped(f"~ between {between} the ranks go on alike", indent, width)
    return lines


def wrapped(text: str, indent: int, width: int) -> list[str]:
    """Lines below a chart."""
    margin = " " * (indent + 1)
    return textwrap.wrap(text, width, initial_indent=margin, subsequent_indent=margin)


def _row(events: Sequence[Event], axis: Axis, columns: int) -> str:
    row = ["."] * columns
    if axis.left_out_s is not None:
        first, last = (axis.place(at_s) for at_s in axis.left_out_s)
        for column in range(_column(first, columns), _column(last, columns)):
            row[column] = "~"
    for event in events:
        first = _column(axis.place(event.start_s), columns)
        last = _column(axis.place(event.end_s), columns)
        row[first:last] = (_letters(event) + "-" * columns)[: last - first]
    return "".join(row)


def _column(place: float, columns: int) -> int:
    """The first column whose middle lies behind a place."""
    return min(max(round(place * columns), 0), columns)


def _letters(event: Event) -> str:
    label = parse_label(event.label)
    if isinstance(label, ComputeLabel):
        return f"{label.letter}{label.micro_batch}"
    return "H" if event.kind is ActionKind.HEAD else "+"


def memory_chart(report: Report, width: int) -> list[str]:
    """A bar a rank, of `width` columns at most, with a letter for each part."""
    peaks = [m.peak_bytes for m in report.memory]
    limits = report.limits_bytes
    is_roomy = max(peaks) < LEAST_SHARE * min(limits)
    scale = max(1, *peaks) if is_roomy else max(*limits, *peaks)
    names = [f"rank {m.rank} " for m in report.memory]
    indent = max(map(len, names))
    columns = max(width - indent - 14, LEAST_COLUMNS)
    lines = [
        f"{name:<{indent}}|{_bar(memory, limit, scale, columns)}| {format_bytes(memory.peak_bytes)}"
        for name, memory, limit in zip(names, report.memory, limits, strict=True)
    ]
    ends = "the highest peak" if is_roomy else f"{format_bytes(scale)}"
    key = ", ".join(
        f"{letter} {name}"
        for letter, (name, _) in zip(LETTERS, report.memory[0].parts, strict=True)
        if any(dict(m.parts)[name] for m in report.memory)
    )
    return [*lines, *wrapped(f"bars end at {ends}: {key}", indent, width)]


def _bar(memory: RankMemory, limit: int, scale: int, columns: int) -> str:
    """Letters for what is held, points for what is free."""
    found, so_far = "", 0
    for letter, (_, size_bytes) in zip(LETTERS, memory.parts, strict=True):
        so_far += size_bytes
        found += letter * (round(so_far / scale * columns) - len(found))
    has = min(round(limit / scale * columns), columns)
    return found.ljust(has, ".").ljust(columns)
