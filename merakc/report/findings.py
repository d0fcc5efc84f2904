"""What a Report has found, as tables for text and HTML."""

from __future__ import annotations

from pathlib import PurePath

from merakc.files.printable import count_of
from merakc.ir.report import Alternatives, HeadTimes, RankMemory, Report, SourceFile, Verdict
from merakc.ir.state import UNSHARDED
from merakc.ir.strategy import Strategy
from merakc.report.charts.labels import ComputeLabel, parse_label
from merakc.report.decisions import Section
from merakc.report.units import bytes_unit, format_bytes, format_count, format_seconds

COMPUTES = {
    "F": "forward", "B": "backward", "I": "gradients of inputs", "W": "gradients of weights",
    "R": "recomputation",
}  # fmt: skip
LEAST_SHARE = 0.0005  # lines of source that take less are counted, not shown
NO_LINE = "(no line)"


def verdict(found: Verdict) -> str:
    """One line: seconds and their mean error where it is known, utilization, idle time, memory,
    throughput.
    """
    peak = f"{format_bytes(found.peak_bytes)} of {format_bytes(found.memory_bytes)}"
    error = f" ± {found.step_error:.0%}" if found.step_error else ""
    parts = [
        f"{format_seconds(found.step_s)}{error} a step",
        f"MFU {found.mfu:.1%}",
        f"bubble {found.bubble_share:.1%}",
        f"peak {peak} on rank {found.peak_rank}" + ("" if found.fits else ": DOES NOT FIT"),
        throughput(found),
    ]
    return ", ".join(parts)


def throughput(found: Verdict) -> str:
    """Tokens a second of a device, or samples where a batch has no tokens."""
    return f"{format_count(found.items_per_s / found.ranks)} {found.items[1]}/s/device"


def utilization(found: Verdict) -> str:
    """What the MFU is made of."""
    rate = f"{format_count(found.peak_flops_per_s)}FLOP/s"
    return (
        f"MFU: {format_count(found.model_flops)}FLOP of the model's forward and backward, over the "
        f"step at {rate}, {found.ranks} x {found.peak_source}."
    )


def report_sections(report: Report) -> dict[str, Section]:
    """All tables, by what they are of, in the order in which they are read."""
    found: dict[str, Section] = {}
    if report.alternatives is not None:
        found |= _alternatives(report.alternatives, report.verdict)
    found["stages"] = _stages(report)
    if report.head is not None:
        found["head"] = _head(report.head, report.verdict)
    found["ranks"] = _ranks(report)
    found["memory"] = _memory(report)
    if report.traffic:
        found["traffic"] = _traffic(report)
    found["nodes"] = _nodes(report)
    for number, file in enumerate(report.files):
        if any(line.share >= LEAST_SHARE for line in file.lines):
            found[f"file {number}"] = _file(file)
    found["origins"] = _origins(report)
    return found


def _alternatives(others: Alternatives, chosen: Verdict) -> dict[str, Section]:
    found: dict[str, Section] = {}
    if others.runners_up:
        columns = {"dp x tp x pp, and how": False, "step": True, "slower": True, "peak": True,
                   "what loses": False}  # fmt: skip
        base_s = others.chosen_s or chosen.step_s
        rows = [
            (
                _strategy(a.strategy), format_seconds(a.step_s), _more(a.step_s, base_s),
                format_bytes(a.peak_bytes), a.loses,
            )
            for a in others.runners_up
        ]  # fmt: skip
        title = (
            f"Why this plan: the {len(rows)} next best"
            if len(rows) > 1
            else ("Why this plan: the next best")
        )
        found["runners-up"] = Section(title, columns, rows, _compared(others.chosen_s, chosen))
    if others.refusals:
        refused = [(r.what, r.why, r.remedy) for r in others.refusals]
        columns = {"refused": False, "why": False, "what would mend it": False}
        found["refusals"] = Section("Refused", columns, refused)
    return found


def _strategy(other: Strategy) -> str:
    """Its degrees, and those of its decisions that are unusual."""
    inside = str(other.form) if other.cp > 1 else str(other.tp)
    parts = [f"{other.dp} x {inside} x {other.pp}", count_of(other.micro_batches, "micro-batch")]
    if other.pp > 1:
        chunks = f" with {other.chunks} stages a rank" if other.chunks > 1 else ""
        parts.append(other.schedule + chunks)
    if other.sequence_parallel:
        parts.append("sequence parallel")
    if other.offload != "none":
        parts.append(f"{other.offload} on the host")
    if other.recompute != "none":
        parts.append(f"recompute {other.recompute}")
    if other.shards(0) != UNSHARDED:
        parts.append(f"shards {other.shards(0)}")
    return ", ".join(parts)


def _compared(chosen_s: float, chosen: Verdict) -> str:
    """How the plans were compared, where the chosen one came out otherwise in full."""
    by_pieces, in_full = format_seconds(chosen_s), format_seconds(chosen.step_s)
    if not chosen_s or by_pieces == in_full:
        return ""
    return (
        f"All are compared by the costs of their pieces, by which a step of this plan takes "
        f"{by_pieces}; it was then planned in full, and takes {in_full}."
    )


def _more(this: float, chosen: float) -> str:
    return f"{this / chosen - 1:+.1%}" if chosen else "-"


def _stages(report: Report) -> Section:
    columns = {"stage": True, "rank": True, "parameters": True, "their bytes": True,
               "forward": True, "backward": True, "recomputed": True, "saved": True}  # fmt: skip
    rows: list[tuple[str, ...]] = [
        (
            str(s.stage), str(s.rank), format_count(s.parameters), format_bytes(s.parameter_bytes),
            format_seconds(s.forward_s), format_seconds(s.backward_s),
            format_seconds(s.recompute_s) if s.recompute_s else "-", format_bytes(s.saved_bytes),
        )
        for s in report.stages
    ]  # fmt: skip
    if len({s.device for s in report.stages}) > 1:
        columns["device"] = False
        rows = [(*row, s.device) for row, s in zip(rows, report.stages, strict=True)]
    return Section("A micro-batch on each stage", columns, rows, "Of one tensor-parallel rank.")


def _head(head: HeadTimes, verdict: Verdict) -> Section:
    columns = {"longer": True, "of the step": True, "its own seconds": True, "higher peak": True}
    share = head.longer_s / verdict.step_s if verdict.step_s else 0.0
    row = (
        format_seconds(head.longer_s), f"{share:.1%}", format_seconds(head.head_s),
        format_bytes(max(head.more_bytes, 0)),
    )  # fmt: skip
    note = "Beside a step whose micro-batches go on by themselves."
    return Section("Micro-batches wait for the whole batch", columns, [row], note)


def _ranks(report: Report) -> Section:
    columns = {"rank": True, "computes": True, "waits for dp": True, "tied gradients": True,
               "warms up": True, "waits": True, "cools down": True}  # fmt: skip
    step_s = report.verdict.step_s or 1.0
    rows = [
        (
            str(r.rank),
            *(
                f"{seconds / step_s:.1%}"
                for seconds in (r.compute_s, r.exposed_s, r.tied_s, r.warm_up_s, r.waiting_s,
                                r.cool_down_s)
            ),
        )
        for r in report.ranks
    ]  # fmt: skip
    note = f"Shares of {format_seconds(report.verdict.step_s)}. {utilization(report.verdict)}"
    return Section("The step of each rank of the pipeline", columns, rows, note)


def _memory(report: Report) -> Section:
    names = [name for name, _ in report.memory[0].parts]
    limits = report.limits_bytes
    differ = len(set(limits)) > 1
    unit, per_byte = bytes_unit(max(m.peak_bytes for m in report.memory))
    most = {name: max(dict(m.parts)[name] for m in report.memory) for name in names}
    shown = [name for name, size in most.items() if round(size * per_byte, 2)]
    columns = {"rank": True, "peak": True, "while": False}
    columns |= dict.fromkeys(shown, True) | {"in flight": True}
    rows = [
        (
            str(m.rank), f"{m.peak_bytes * per_byte:.2f}", m.action,
            *(f"{dict(m.parts)[name] * per_byte:.2f}" for name in shown), str(m.in_flight),
        )
        for m in report.memory
    ]  # fmt: skip
    if differ:
        columns["has"] = True
        rows = [(*row, f"{has * per_byte:.2f}") for row, has in zip(rows, limits, strict=True)]
    if any(m.arena_bytes for m in report.memory):
        columns |= {"arena": True, "over bound": True}
        rows = [(*row, *_arena(m, per_byte)) for row, m in zip(rows, report.memory, strict=True)]
    reserved = report.verdict.reserved_bytes
    beside = f" for tensors, beside {format_bytes(reserved)} reserved" if reserved else ""
    every = "" if differ else f"A rank has {format_bytes(limits[0])}{beside}. "
    note = every + _peak_text(report)
    return Section(f"Memory at the peak of each rank, in {unit}", columns, rows, note)


def _arena(memory: RankMemory, per_byte: float) -> tuple[str, str]:
    """What all values of a step take with places of their own, and how much of it is lost."""
    if not memory.arena_bytes:
        return "-", "-"
    share = memory.arena_bytes / memory.bound_bytes
    return f"{memory.arena_bytes * per_byte:.2f}", f"x {share:.3f}"


def _peak_text(report: Report) -> str:
    most: RankMemory = max(report.memory, key=lambda m: m.peak_bytes)
    parts = sorted(most.parts, key=lambda part: -part[1])
    name, size_bytes = parts[0]
    share = size_bytes / most.peak_bytes if most.peak_bytes else 0.0
    text = f"Rank {most.rank} needs most, {share:.0%} of it for {name}."
    label = parse_label(most.action)
    if isinstance(label, ComputeLabel):
        text += (
            f" While {most.action}: stage {label.stage}, {COMPUTES[label.letter]}, micro-batch "
            f"{label.micro_batch}."
        )
    return text + (" While the loss couples the samples." if most.action.endswith("head") else "")


def _traffic(report: Report) -> Section:
    columns = {"axis": False, "ranks": True, "what": False, "busiest rank": True, "sends": True,
               "takes": True, "waited for": True, "hidden": True}  # fmt: skip
    rows = [
        (
            t.axis, str(t.ranks), t.what, str(t.rank), format_bytes(t.sent_bytes),
            format_seconds(t.seconds), format_seconds(t.exposed_s), f"{t.hidden_share:.0%}",
        )
        for t in report.traffic
    ]  # fmt: skip
    return Section("Communication in a step", columns, rows)


def _nodes(report: Report) -> Section:
    columns = {"share": True, "module": False, "operation": False, "at": False,
               "result (* is split)": False, "seconds": True, "count": True}  # fmt: skip
    rows = [
        (
            f"{n.share:.1%}", n.module or "(model)", n.op, PurePath(n.source).name or NO_LINE,
            n.layout, format_seconds(n.seconds), str(n.count),
        )
        for n in report.nodes
    ]  # fmt: skip
    rest = max(1.0 - sum(n.share for n in report.nodes), 0.0)
    more = report.node_count - len(report.nodes)
    note = f"Of all computing. {more} other kinds take {rest:.1%}." if more else "Of all computing."
    return Section("What takes longest", columns, rows, note)


def _file(file: SourceFile) -> Section:
    columns = {"line": True, "share": True, "source": False, "results": False, "nodes": True}
    shown = [line for line in file.lines if line.share >= LEAST_SHARE]
    rows, function = [], ""
    for line in shown:
        if line.function != function:
            function = line.function
            rows.append(("", "", f"in {function}:" if function else "", "", ""))
        number = str(line.number) if line.number else ""
        layouts = "\n".join(line.layouts)
        rows.append((number, f"{line.share:.1%}", line.text, layouts, str(line.count)))
    rest = [line.share for line in file.lines if line.share < LEAST_SHARE]
    more = "1 more line takes" if len(rest) == 1 else f"{len(rest)} more lines take"
    note = f"{more} {sum(rest):.1%}." if rest else ""
    title = file.path or f"{NO_LINE}: what stands for no call of the model's own"
    return Section(title, columns, rows, note)


def _origins(report: Report) -> Section:
    columns = {"figures": False, "are": False, "how": False}
    rows = [(o.what, o.origin, o.how) for o in report.origins]
    return Section(f"Where the figures are from: {report.cluster}", columns, rows)
