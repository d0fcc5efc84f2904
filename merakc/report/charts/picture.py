"""A report's pictures for a page: the schedule as SVG, memory and its parts as bars."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from merakc.ir.program import ActionKind, Event
from merakc.ir.report import RankMemory, Report
from merakc.report.charts.chart import LEAST_SHARE
from merakc.report.charts.labels import ComputeLabel, parse_label
from merakc.report.charts.markup import Markup, join, tag
from merakc.report.charts.view import Axis, view
from merakc.report.units import format_bytes, format_seconds

# The names of computes, and the letters of their classes in the style sheet.
KINDS = {
    ActionKind.FORWARD: ("forward", "f"),
    ActionKind.BACKWARD: ("backward", "b"),
    ActionKind.INPUT_GRAD: ("input gradient", "i"),
    ActionKind.WEIGHT_GRAD: ("weight gradient", "w"),
    ActionKind.RECOMPUTE: ("recompute", "r"),
    ActionKind.HEAD: ("coupled loss", "h"),
    ActionKind.GATHER: ("gather over dp", "g"),
    ActionKind.REDUCE: ("reduce", "d"),
}
# Boxes that a rank's row has room for, in a picture of this width, in its own units.
PER_RANK = 110
WIDTH, LABEL_WIDTH, ROW_HEIGHT, BOX_HEIGHT, LANE_HEIGHT, AXIS_HEIGHT = 1100, 50, 22, 18, 4, 20
DIGIT_WIDTH = 6.5
TICKS = 5


def schedule_picture(report: Report) -> Markup:
    """A row a rank, a box a compute with its micro-batch; collectives over dp along the edge."""
    found = view(report.timeline, PER_RANK, [r.rank for r in report.ranks])
    height = ROW_HEIGHT * len(found.rows) + AXIS_HEIGHT
    parts: list[Markup] = []
    for row, (name, events) in enumerate(zip(report.ranks, found.rows.values(), strict=True)):
        top = row * ROW_HEIGHT
        parts.append(tag("text", f"rank {name.rank}", x=0, y=top + 13, class_="label"))
        parts.append(_rect("idle", LABEL_WIDTH, top, WIDTH - LABEL_WIDTH, BOX_HEIGHT))
        parts += _boxes(events, found.axis, top)
    ranks = list(found.rows)
    for wait in found.waits:
        if wait.rank in found.rows:
            parts.append(_wait(wait, found.axis, ranks.index(wait.rank) * ROW_HEIGHT))
    for event in found.collectives:
        if event.rank in found.rows:
            top = ranks.index(event.rank) * ROW_HEIGHT + BOX_HEIGHT - LANE_HEIGHT
            parts.append(_box(event, found.axis, top, LANE_HEIGHT, " lane"))
    parts += _gap(found.axis, ROW_HEIGHT * len(found.rows))
    parts += _ticks(found.axis, height)
    kinds = {e.kind for own in (*found.rows.values(), found.collectives) for e in own}
    svg = tag(
        "svg", *parts, viewBox=f"0 0 {WIDTH} {height}", role="img",
        aria_label="The schedule: what each rank computes when",
    )  # fmt: skip
    named = [(name, f"k{letter}") for kind, (name, letter) in KINDS.items() if kind in kinds]
    return join(tag("div", svg, class_="scroll picture"), legend([*named, ("idle", "idle")]))


def legend(entries: Iterable[tuple[str, str]]) -> Markup:
    """Names beside samples of their classes."""
    items = (join(tag("i", class_=f"key {of}"), name) for name, of in entries)
    return tag("p", *(tag("span", item) for item in items), class_="legend")


def _boxes(events: Sequence[Event], axis: Axis, top: float) -> Iterator[Markup]:
    for event in events:
        yield _box(event, axis, top, BOX_HEIGHT)
        label = parse_label(event.label)
        if isinstance(label, ComputeLabel):
            left, right = _x(axis, event.start_s), _x(axis, event.end_s)
            text = str(label.micro_batch)
            if right - left >= DIGIT_WIDTH * len(text) + 2:
                middle = (left + right) / 2
                of = f"n{KINDS[event.kind][1]}"
                yield tag("text", text, x=middle, y=top + 13, class_=of)


def _box(event: Event, axis: Axis, top: float, height: float, kind: str = "") -> Markup:
    left, right = _x(axis, event.start_s), _x(axis, event.end_s)
    times = f"{format_seconds(event.start_s)} to {format_seconds(event.end_s)}"
    title = tag("title", f"{event.label}, {times}")
    return _rect(f"k{KINDS[event.kind][1]}{kind}", left, top, right - left, height, title)


def _wait(event: Event, axis: Axis, top: float) -> Markup:
    """What of a compute is none, but waiting for a collective."""
    left, right = _x(axis, event.start_s), _x(axis, event.end_s)
    title = tag("title", f"waits for {event.label}, {format_seconds(event.end_s - event.start_s)}")
    return _rect("idle", left, top, right - left, BOX_HEIGHT, title)


def _rect(of: str, left: float, top: float, width: float, height: float, *inside: Markup) -> Markup:
    return tag("rect", *inside, x=left, y=top, width=width, height=height, class_=of)


def _x(axis: Axis, time_s: float) -> float:
    return LABEL_WIDTH + axis.place(time_s) * (WIDTH - LABEL_WIDTH)


def _gap(axis: Axis, height: float) -> Iterator[Markup]:
    if axis.left_out_s is not None:
        left, right = (_x(axis, at_s) for at_s in axis.left_out_s)
        first, last = map(format_seconds, axis.left_out_s)
        title = tag("title", f"{first} to {last}: the ranks go on alike")
        yield _rect("gap", left, 0, right - left, height, title)
        yield tag("text", "...", x=(left + right) / 2, y=height / 2, class_="middle")


def _ticks(axis: Axis, height: float) -> Iterator[Markup]:
    """Times along the lower edge; where something is left out, from when to when."""
    if axis.left_out_s is None:
        times = [(axis.end_s * k / TICKS, "middle") for k in range(1, TICKS)]
    else:
        times = list(zip(axis.left_out_s, ("end", "start"), strict=True))
    for at_s, side in ((0.0, "start"), *times, (axis.end_s, "end")):
        text = format_seconds(at_s) if at_s else "0"
        yield tag("text", text, x=_x(axis, at_s), y=height - 5, class_=f"label {side}")


def memory_picture(report: Report) -> Markup:
    """A bar a rank, up to the memory that it has, in the colours of its parts."""
    peak = max(m.peak_bytes for m in report.memory)
    limits = report.limits_bytes
    scale = peak if peak < LEAST_SHARE * min(limits) else max(*limits, peak)
    rows = [_bar(memory, scale, own) for memory, own in zip(report.memory, limits, strict=True)]
    shown = [
        (name, f"p{k}")
        for k, (name, _) in enumerate(report.memory[0].parts)
        if any(m.parts[k][1] for m in report.memory)
    ]
    ends = "the highest peak" if scale == peak else f"the {format_bytes(scale)} of a rank"
    return join(tag("div", *rows, class_="bars"), legend(shown), tag("p", f"Bars end at {ends}."))


def _bar(memory: RankMemory, scale: int, full: int) -> Markup:
    parts = [
        tag("i", class_=f"p{k}", style=f"width:{size / max(scale, 1):.3%}",
            title=f"{name}: {format_bytes(size)}")
        for k, (name, size) in enumerate(memory.parts)
        if size
    ]  # fmt: skip
    over = " over" if memory.peak_bytes > full else ""
    return join(
        tag("span", f"rank {memory.rank}"),
        tag("div", *parts, class_=f"bar{over}"),
        tag("span", format_bytes(memory.peak_bytes), class_="number"),
    )
