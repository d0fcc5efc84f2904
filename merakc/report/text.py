"""A plan as text: what runs where, what is split, what it costs."""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Iterable, Mapping

from rich import box
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from merakc.ir.plan import CutReport, OpaqueModule, Plan, Prediction

_LAYER_INDEX = re.compile(r"(?:(?<=\.)|^)\d+(?=\.|$)")


def plan_text(plan: Plan, width: int = 100) -> str:
    """`plan_table` as plain text of at most `width` columns, without colours."""
    page = io.StringIO()
    Console(file=page, width=width, color_system=None, legacy_windows=False).print(plan_table(plan))
    return "\n".join(line.rstrip() for line in page.getvalue().splitlines()) + "\n"


def plan_table(plan: Plan) -> Group:
    """The decisions of a plan for `rich` to print: a panel, then a table for each kind.

    Parameter names appear as patterns in which `*` stands for a layer's index.
    """
    parts: list[RenderableType] = [_header(plan), _stages(plan), _tensors(plan)]
    if any(len(stages) > 1 for stages in plan.parameters.values()):
        parts.append(_shared(plan))
    if plan.collectives:
        parts.append(_collectives(plan.collectives))
    if plan.whole_ops:
        parts.append(_whole_ops(plan.whole_ops))
    if plan.opaque_modules:
        parts.append(_opaque(plan.opaque_modules))
    parts.append(_cut(plan.cut, len(plan.rank_of)))
    return Group(*parts)


def _whole_ops(ops: tuple[str, ...]) -> Group:
    rows = [op.split(" at ", 1) for op in ops]
    return _table("Run whole on every tp rank: no sharding rule", {"op": False, "at": False}, rows)


def _opaque(modules: tuple[OpaqueModule, ...]) -> Group:
    """Modules of one pattern and reason share a row, with the sum of their shares."""
    shares: dict[tuple[str, str, str], list[float]] = {}
    for m in modules:
        shares.setdefault((name_pattern(m.name), m.source, m.reason), []).append(m.flops_share)
    rows = [
        (*key, str(len(own)), f"{sum(own):.0%}" if sum(own) else "-") for key, own in shares.items()
    ]
    columns = {"module": False, "at": False, "why": False, "count": True, "of all flops": True}
    return _table("Run as they are, whole on one stage: not recordable", columns, rows)


def format_bytes(size_bytes: float) -> str:
    """1536 -> "1.50 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size_bytes) < 1024:
            return f"{size_bytes:.0f} B" if unit == "B" else f"{size_bytes:.2f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.2f} TiB"


def format_seconds(time_s: float) -> str:
    """0.0015 -> "1.50 ms"."""
    for unit, per_second in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if abs(time_s) * per_second >= 1:
            return f"{time_s * per_second:.2f} {unit}"
    return f"{time_s * 1e6:.2f} us"


def _table(title: str, columns: Mapping[str, bool], rows: Iterable[Iterable[str]]) -> Group:
    """A titled table of plain cells; `columns` says which are numbers."""
    table = Table(box=box.SIMPLE_HEAD)
    for name, is_number in columns.items():
        table.add_column(name, justify="right" if is_number else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))  # not str: `[0]` would be taken for markup
    return Group(Text(title, style="bold"), table)  # a table's own title is folded to its width


def _facts(pairs: Iterable[tuple[str, str]]) -> Table:
    grid = Table.grid(padding=(0, 2))
    for name, value in pairs:
        grid.add_row(Text(name, style="dim"), Text(value))
    return grid


def _header(plan: Plan) -> Panel:
    mesh = f"dp {plan.dp} x tp {plan.tp} x pp {plan.pp} = {plan.mesh.world_size} ranks"
    facts = [
        ("mesh", mesh + (", sequence parallel" if plan.sequence_parallel else "")),
        ("batch", f"{plan.batch_size} in {plan.micro_batches} micro-batches"),
        ("schedule", plan.schedule),
        ("recompute", plan.recompute),
        ("plan", f"{plan.hash[:12]}, of graph {plan.graph.hash[:12]}"),
    ]
    if _is_sharded(plan):
        shares = "; ".join(str(shards) for shards in dict.fromkeys(plan.state_shards))
        facts.append(("shards", f"{shares} of parameters, gradients, optimizer state"))
    if plan.sub_batches:
        facts.append(("overlap", _overlap(plan)))
    if plan.precision:
        facts.append(("precision", str(plan.precision)))
    if plan.prediction:
        facts.insert(4, ("predicted", _prediction(plan.prediction)))
    return Panel(_facts(facts), title=Text(plan.model), title_align="left", expand=False)


def _is_sharded(plan: Plan) -> bool:
    return any(shards.optimizer > 1 for shards in plan.state_shards)


def _prediction(prediction: Prediction) -> str:
    exposed_s = max(prediction.exposed_s, default=0.0)
    exposed = f"{format_seconds(exposed_s)} waiting for dp, " if exposed_s else ""
    return (
        f"{format_seconds(prediction.step_s)} a step, {prediction.bubble_share:.1%} idle, "
        f"{exposed}peak {format_bytes(max(prediction.peak_bytes, default=0))}"
    )


def _overlap(plan: Plan) -> str:
    """In how many parts stages run a micro-batch, and what that saves."""
    parts = []
    for count in dict.fromkeys(plan.sub_batches):
        stages = [s for s, own in enumerate(plan.sub_batches) if own == count]
        every = len(stages) == len(plan.sub_batches)
        where = "" if every else f" on stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}"
        form = f"micro-batches in {count} parts" if count > 1 else "whole micro-batches"
        gains = [plan.overlap_gains[s] for s in stages if plan.overlap_gains]
        saved = f", saves {min(gains):.1%} to {max(gains):.1%} of a stage" if gains else ""
        parts.append(form + where + saved)
    return "; ".join(parts)


def _stages(plan: Plan) -> Group:
    peaks = plan.prediction.peak_bytes if plan.prediction else ()
    rows: list[tuple[str, ...]] = []
    for stage, rank in enumerate(plan.rank_of):
        runs = [r for r in plan.stages if r.stage == stage]
        modules = "\n".join(_span(r.first_module, r.last_module) for r in runs)
        held = sum(stage in stages for stages in plan.parameters.values())
        peak = format_bytes(peaks[rank]) if rank < len(peaks) else "-"
        rows.append((str(stage), str(rank), modules, str(held), peak))
    columns = {"stage": True, "rank": True, "modules": False, "parameters": True,
               "predicted peak": True}  # fmt: skip
    if _is_sharded(plan):
        columns |= {"shards": True, "waits for dp": True}
        waits = plan.prediction.exposed_s if plan.prediction else ()
        for stage, rank in enumerate(plan.rank_of):
            exposed = format_seconds(waits[rank]) if rank < len(waits) else "-"
            rows[stage] += (str(plan.shards(stage)), exposed)
    if not plan.placement:  # each rank has the stage of its number
        del columns["rank"]
        rows = [(stage, *rest) for stage, _, *rest in rows]
    return _table("Stages", columns, rows)


def _span(first: str, last: str) -> str:
    first, last = first or "(model)", last or "(model)"
    return first if first == last else f"{first} .. {last}"


def name_pattern(name: str) -> str:
    """`layers.3.mlp.weight` -> `layers.*.mlp.weight`."""
    return _LAYER_INDEX.sub("*", name)


def _tensors(plan: Plan) -> Group:
    groups = Counter((name_pattern(name), layout) for name, layout in plan.splits.items())
    rows = [(pattern, layout, str(count)) for (pattern, layout), count in groups.items()]
    whole = sum(name not in plan.splits for name in plan.parameters)
    rows.append(("(all other parameters)", "whole", str(whole)))
    columns = {"tensor": False, "layout (* is split)": False, "count": True}
    return _table(f"Tensors over tp {plan.tp}", columns, rows)


def _shared(plan: Plan) -> Group:
    groups = Counter(
        (name_pattern(name), ", ".join(map(str, stages)))
        for name, stages in plan.parameters.items()
        if len(stages) > 1
    )
    rows = [(pattern, stages, str(count)) for (pattern, stages), count in groups.items()]
    columns = {"parameter": False, "stages": False, "count": True}
    return _table("Parameters held by several stages", columns, rows)


def _collectives(collectives: Mapping[str, int]) -> Group:
    rows = [(name, str(count)) for name, count in collectives.items()]
    return _table("tp collectives of a micro-batch", {"collective": False, "count": True}, rows)


def _cut(cut: CutReport, stages: int) -> Group:
    rows = [
        ("chosen: " + cut.winner, f"{cut.load:.3f}", format_bytes(cut.cut_bytes), ""),
        (
            "METIS' proposal",
            f"{cut.metis_load:.3f}",
            format_bytes(cut.metis_cut_bytes),
            str(cut.metis_moves),
        ),
        ("bound", f"{cut.bound_load:.3f}", "", ""),
    ]
    columns = {"cut": False, "load": True, "cut bytes": True, "blocks moved": True}
    return _table(f"Cut into {stages} stages (load 1 is even)", columns, rows)
