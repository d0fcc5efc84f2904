"""What a plan decides, as tables for text and HTML."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from merakc.files.printable import count_of
from merakc.ir.layout import block_sums
from merakc.ir.plan import CoupledLoss, OpaqueModule, Plan
from merakc.ir.plan_file import PlanFile, Prediction
from merakc.ir.report import CutReport
from merakc.report.units import format_bytes, format_seconds, name_pattern


@dataclass(frozen=True, slots=True)
class Section:
    """A table under a title: the columns, which of them are numbers, and the cells' text."""

    title: str
    columns: Mapping[str, bool]
    rows: Sequence[Sequence[str]]
    note: str = ""


def plan_facts(file: PlanFile, *, predicted: bool = True) -> list[tuple[str, str]]:
    """The degrees and the other decisions for the whole plan, by name; and what is `predicted`,
    which a report's verdict tells too.
    """
    plan = file.decisions
    mesh = f"{plan.shown_degrees} = {count_of(plan.mesh.world_size, 'rank')}"
    each = f": {plan.batch_size:,} on each dp rank" if plan.dp > 1 else ""
    batch = count_of(plan.batch_size * plan.dp, "sample") + each
    facts = [
        ("mesh", mesh + (", sequence parallel" if plan.sequence_parallel else "")),
        ("batch", f"{batch}, in {count_of(plan.micro_batches, 'micro-batch')}"),
        ("schedule", plan.schedule),
        ("recompute", _recompute(plan)),
        ("plan", f"{plan.hash[:12]}, of graph {plan.graph.hash[:12]}"),
    ]
    if _is_sharded(plan):
        shares = "; ".join(str(shards) for shards in dict.fromkeys(plan.state_shards))
        facts.append(("shards", f"{shares} of parameters, gradients, optimizer state"))
    if plan.sub_batches:
        gains = file.prediction.overlap_gains if file.prediction else ()
        facts.append(("overlap", _overlap(plan, gains)))
    if plan.offload != "none":
        facts.append(("on the host", _offload(plan, file.prediction)))
    if plan.expert_load:
        facts.append(("tokens", _load(plan)))
    if plan.precision:
        facts.append(("precision", str(plan.precision)))
    if predicted and file.prediction:
        facts.insert(4, ("predicted", _prediction(file.prediction, plan)))
    return facts


def _load(plan: Plan) -> str:
    """What the ranks of experts get, where it is not as much each."""
    shares = block_sums(plan.expert_load, plan.cp)
    return f"{max(shares):.0%} to one of {plan.cp} ranks of experts, {min(shares):.0%} to another"


def plan_sections(file: PlanFile) -> list[Section]:
    """The decisions in detail: stages, splits, what is shared, what could not be split, the cut.

    Parameter names appear as patterns in which `*` stands for a layer's index.
    """
    plan = file.decisions
    found = [_stages(file)]
    if plan.lanes > 1:
        found.append(_tensors(plan))
    if any(len(stages) > 1 for stages in plan.parameters.values()):
        found.append(_shared(plan))
    if file.report and file.report.collectives:
        found.append(_collectives(plan, file.report.collectives))
    if file.report and file.report.exchanged:
        title = "Sequences exchanged for heads: calls on all of a sequence, with parts of the heads"
        found.append(_calls(title, file.report.exchanged))
    if file.report and file.report.rings:
        title = "Keys and values passed around: calls on blocks of a sequence, one after the other"
        found.append(_calls(title, file.report.rings))
    if plan.whole_ops:
        found.append(_whole_ops(plan.whole_ops))
    if plan.head is not None:
        found.append(_head(plan.head))
    if plan.opaque_modules:
        found.append(_opaque(plan.opaque_modules))
    if len(plan.rank_of) > 1 and file.report and file.report.cut:
        found.append(_cut(file.report.cut, len(plan.rank_of)))
    return found


def stage_modules(plan: Plan, stage: int) -> str:
    """The modules of a stage, from the first to the last of each run of nodes."""
    runs = (r for r in plan.stages if r.stage == stage)
    return "\n".join(_span(r.first_module, r.last_module) for r in runs)


def _is_sharded(plan: Plan) -> bool:
    return any(shards.optimizer > 1 for shards in plan.state_shards)


def _prediction(prediction: Prediction, plan: Plan) -> str:
    others = ["dp"] * (plan.state_ranks > 1) + ["the host"] * bool(plan.on_host)
    exposed_s = max(prediction.exposed_s, default=0.0)
    exposed = (
        f"{format_seconds(exposed_s)} waiting for {' and '.join(others)}, " if exposed_s else ""
    )
    return (
        f"{format_seconds(prediction.step_s)} a step, {prediction.bubble_share:.1%} idle, "
        f"{exposed}peak {format_bytes(max(prediction.peak_bytes, default=0))}"
    )


def _recompute(plan: Plan) -> str:
    """How, and what the blocks of stages keep, where that was chosen."""
    kept = "; ".join(dict.fromkeys(plan.kept_blocks))
    return plan.recompute + (f": {kept}" if kept else "")


def _offload(plan: Plan, prediction: Prediction | None) -> str:
    """The kinds of tensors that live there, how many, and what the update of states takes."""
    parts = []
    if plan.host_activations:
        shares = dict.fromkeys(f"{share:.0%}" for share in plan.host_activations)
        parts.append(f"{', '.join(shares)} of what stages keep for backwards")
    if plan.host_states:
        host_s = max(prediction.host_s, default=0.0) if prediction else 0.0
        left_s = max(prediction.host_left_s, default=host_s) if prediction else host_s
        took = f", {format_seconds(host_s)} a step for its update" if host_s else ""
        if left_s < 0.95 * host_s:
            took += f" ({format_seconds(left_s)} with merakc.step_in_backward)"
        parts.append(f"state of {count_of(len(plan.host_states), 'parameter')}{took}")
    if plan.host_parameters:
        parts.append(f"{count_of(len(plan.host_parameters), 'parameter')}, fetched when read")
    return f"{plan.offload}: {'; '.join(parts)}"


def _overlap(plan: Plan, of_stages: Sequence[float]) -> str:
    """In how many parts stages run a micro-batch, and what that saves."""
    parts = []
    for count in dict.fromkeys(plan.sub_batches):
        stages = [s for s, own in enumerate(plan.sub_batches) if own == count]
        every = len(stages) == len(plan.sub_batches)
        where = "" if every else f" on stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}"
        form = f"micro-batches in {count} parts" if count > 1 else "whole micro-batches"
        gains = [of_stages[s] for s in stages if of_stages]
        saved = f", {_saved(gains)} of a stage" if gains else ""
        parts.append(form + where + saved)
    for count, products in sorted(Counter(plan.row_chunks.values()).items()):
        parts.append(
            f"{count_of(products, 'product')} beside collectives in {count} chunks of rows"
        )
    if plan.fused_products:
        parts.append(
            f"{count_of(len(plan.fused_products), 'product')} in one op with their collectives"
        )
    return "; ".join(parts)


def _saved(gains: Sequence[float]) -> str:
    """What a few stages save, or what it costs them."""
    verb, sign = ("saves", 1) if max(gains) > 0 else ("costs", -1)
    shares = [f"{sign * share:.1%}" for share in sorted(gains, key=lambda share: sign * share)]
    return f"{verb} {' to '.join(dict.fromkeys((shares[0], shares[-1])))}"


def _stages(file: PlanFile) -> Section:
    plan, prediction = file.decisions, file.prediction
    peaks = prediction.peak_bytes if prediction else ()
    rows: list[tuple[str, ...]] = []
    for stage, rank in enumerate(plan.rank_of):
        held = sum(stage in stages for stages in plan.parameters.values())
        peak = format_bytes(peaks[rank]) if rank < len(peaks) else "-"
        rows.append((str(stage), str(rank), stage_modules(plan, stage), str(held), peak))
    columns = {"stage": True, "rank": True, "modules": False,
               "parameter tensors": True, "predicted peak": True}  # fmt: skip
    if _is_sharded(plan):
        columns |= {"shards": True, "waits for dp": True}
        waits = prediction.exposed_s if prediction else ()
        for stage, rank in enumerate(plan.rank_of):
            exposed = format_seconds(waits[rank]) if rank < len(waits) else "-"
            rows[stage] += (str(plan.shards(stage)), exposed)
    devices = {s.stage: s.device for s in file.report.stages} if file.report else {}
    if len(set(devices.values())) > 1:
        columns["device"] = False
        rows = [(*row, devices.get(stage, "-")) for stage, row in enumerate(rows)]
    if not plan.placement:  # each rank has the stage of its number
        del columns["rank"]
        rows = [(stage, *rest) for stage, _, *rest in rows]
    return Section("Stages", columns, rows)


def _span(first: str, last: str) -> str:
    first, last = first or "(model)", last or "(model)"
    return first if first == last else f"{first} .. {last}"


def _tensors(plan: Plan) -> Section:
    groups = Counter((name_pattern(name), layout) for name, layout in plan.splits.items())
    rows = [(pattern, layout, str(count)) for (pattern, layout), count in groups.items()]
    whole = sum(name not in plan.splits for name in plan.parameters)
    rows.append(("(all other parameters)", "whole", str(whole)))
    star = "* is split"
    if plan.expert_parallel and plan.tp > 1:
        star = f"*{plan.tp} over tp, *{plan.cp}/{plan.tp} over ep"
    columns = {"tensor": False, f"layout ({star})": False, "count": True}
    return Section(f"Tensors over {plan.form}", columns, rows)


def _shared(plan: Plan) -> Section:
    groups = Counter(
        (name_pattern(name), ", ".join(map(str, stages)))
        for name, stages in plan.parameters.items()
        if len(stages) > 1
    )
    rows = [(pattern, stages, str(count)) for (pattern, stages), count in groups.items()]
    columns = {"parameter": False, "stages": False, "count": True}
    return Section("Parameters held by several stages", columns, rows)


def _collectives(plan: Plan, collectives: Mapping[str, int]) -> Section:
    rows = [(name, str(count)) for name, count in collectives.items()]
    return Section(
        f"{plan.form.axes} collectives of a micro-batch", {"collective": False, "count": True}, rows
    )


def _calls(title: str, calls: Mapping[str, int]) -> Section:
    rows = [(*call.split(" at ", 1), str(count)) for call, count in calls.items()]
    return Section(title, {"module": False, "at": False, "calls": True}, rows)


def _whole_ops(ops: tuple[str, ...]) -> Section:
    rows = [op.split(" at ", 1) for op in ops]
    title = "Run whole on every tp rank: no sharding rule"
    return Section(title, {"op": False, "at": False}, rows)


def _opaque(modules: tuple[OpaqueModule, ...]) -> Section:
    """Modules of one pattern and reason share a row, with the sum of their shares."""
    shares: dict[tuple[str, str, str], list[float]] = {}
    for m in modules:
        shares.setdefault((name_pattern(m.name), m.source, m.reason), []).append(m.flops_share)
    rows = [
        (*key, str(len(own)), f"{sum(own):.0%}" if sum(own) else "-") for key, own in shares.items()
    ]
    columns = {"module": False, "at": False, "why": False, "count": True, "of all flops": True}
    return Section("Run as they are, whole on one stage: not recordable", columns, rows)


def _head(head: CoupledLoss) -> Section:
    columns = {"at": False, "why": False, "behind stage": True, "reads": True}
    row = (head.source, head.why, str(head.stage), format_bytes(head.waist_bytes))
    title = "Micro-batches wait for the whole batch: the loss couples samples"
    return Section(title, columns, [row])


def _cut(cut: CutReport, stages: int) -> Section:
    by = {"dp": "dynamic programming", "metis": "METIS"}.get(cut.winner, cut.winner)
    rows = [
        (f"chosen: {by}", f"{cut.load:.3f}", format_bytes(cut.cut_bytes), ""),
        (
            "METIS' proposal",
            f"{cut.metis_load:.3f}",
            format_bytes(cut.metis_cut_bytes),
            str(cut.metis_moves),
        ),
        ("bound", f"{cut.bound_load:.3f}", "", ""),
    ]
    columns = {"cut": False, "load": True, "cut bytes": True, "blocks moved": True}
    return Section(f"Cut into {count_of(stages, 'stage')} (load 1 is even)", columns, rows)
