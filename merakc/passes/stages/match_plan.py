"""Whether a plan says of a graph what the graph itself says.

Much of a plan follows from the rest of it and the graph: where stages begin and end, which of them
hold a parameter, how what belongs together is split. A plan that says otherwise was damaged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from merakc.errors import PlanError
from merakc.ir.graph import Graph, InputKind
from merakc.ir.layout import parse_layout
from merakc.ir.plan import Plan
from merakc.passes.stages.stage import Stages, stage_runs

TENSORS = (InputKind.PARAMETER, InputKind.BUFFER)


def holders(graphs: tuple[Graph, ...]) -> dict[str, tuple[int, ...]]:
    """The stages that read each parameter."""
    found: dict[str, list[int]] = {}
    for stage, graph in enumerate(graphs):
        for item in graph.inputs:
            if item.kind is InputKind.PARAMETER:
                found.setdefault(item.target, []).append(stage)
    return {name: tuple(stages) for name, stages in found.items()}


def check_match(plan: Plan, recorded: Graph, graph: Graph, stages: Stages) -> None:
    """Raises `PlanError` where the plan contradicts the `graph` that its stages were cut from.

    `recorded` is the whole forward, with what training does not need.
    """
    for text in _problems(plan, recorded, graph, stages):
        raise PlanError(f"the plan does not fit the graph: {text}; make the plan again")


def _problems(plan: Plan, recorded: Graph, graph: Graph, stages: Stages) -> Iterator[str]:
    runs = stage_runs(graph, stages.of)
    if runs != plan.stages:
        pairs = zip(runs, plan.stages, strict=False)
        unlike = [f"{run} is planned as {planned}" for run, planned in pairs if run != planned]
        yield unlike[0] if unlike else f"it has {len(plan.stages)} runs of nodes for {len(runs)}"
    for transfer in stages.transfers:
        if transfer.source_stage > transfer.target_stage:
            yield (
                f"stage {transfer.target_stage} reads {transfer.value} of stage "
                f"{transfer.source_stage}, which runs after it"
            )
    specs = {i.target: i for i in recorded.inputs if i.kind in TENSORS}
    held = holders(stages.graphs)
    for name, found in held.items():  # what no graph reads, the plan may put anywhere
        if found != plan.parameters.get(name):
            yield f"'{name}' is on stages {found}, planned on {plan.parameters.get(name)}"
    yield from _splits(plan, graph, stages, {n: i.spec.shape for n, i in specs.items()})


def _splits(
    plan: Plan, graph: Graph, stages: Stages, shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[str]:
    """Differences in splits: of what training reads, in layout; of other tensors, in shape."""
    read = {i.target for i in graph.inputs if i.kind in TENSORS}
    found = {name: str(lay) for name, lay in stages.sharding.splits(graph).items()}
    for name in found.keys() | plan.splits.keys():
        planned = plan.splits.get(name, "whole")
        if name in read and found.get(name, "whole") != planned:
            yield f"'{name}' is split {found.get(name, 'whole')}, planned {planned}"
        if name not in read and parse_layout(planned).shape != shapes.get(name):
            yield f"'{name}' of shape {shapes.get(name)} is planned to be split {planned}"
