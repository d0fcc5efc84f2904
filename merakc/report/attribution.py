"""Whose the time is: the seconds of a step, shared out among kinds of nodes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from merakc.costs.device import Place, collective_seconds, kernel_seconds, place_on
from merakc.costs.ranks import stage_devices
from merakc.costs.work.kernels import Kernel, KernelKind, Work, parts_work
from merakc.ir.costs import StageCost
from merakc.ir.graph import Graph, Node, Ref
from merakc.ir.program import ActionKind
from merakc.lowering.lowered import Lowered
from merakc.machines.cluster import Cluster
from merakc.passes.sharding.layouts import Sharding
from merakc.report.units import name_pattern

# The prefixes and the overload of an operation's name tell readers nothing.
_PREFIXES = ("aten.", "merakc.", "composite.")


@dataclass(frozen=True, slots=True)
class Kind:
    """What alike nodes have in common; `source` is the line with its whole path."""

    module: str
    op: str
    source: str
    layout: str


@dataclass(slots=True)
class Spent:
    """Seconds of a micro-batch, or of a step, and how much of it links take."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    forward_wire_s: float = 0.0
    backward_wire_s: float = 0.0

    def scaled(self, forward: float, backward: float) -> Spent:
        """The same with other seconds in all."""
        return Spent(
            self.forward_s * forward,
            self.backward_s * backward,
            self.forward_wire_s * forward,
            self.backward_wire_s * backward,
        )


@dataclass(frozen=True)
class StageTime:
    """The seconds of one stage's micro-batch by kind of node, and its collectives over tp.

    They add up to the stage's costs. `collectives` counts forward and backward.
    """

    spent: Mapping[Kind, Spent]
    counts: Mapping[Kind, int]
    collectives: Mapping[Kernel, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Attribution:
    """The time of all stages, and how often each runs what."""

    stages: Sequence[StageTime]
    runs: Sequence[Counter[ActionKind]]
    costs: Sequence[StageCost]

    @cached_property
    def step_seconds(self) -> dict[Kind, float]:
        """Seconds of a step by kind, over all ranks of the pipeline, the longest first."""
        found: defaultdict[Kind, float] = defaultdict(float)
        for stage in range(len(self.stages)):
            for kind, spent in self.step_spent(stage).items():
                found[kind] += spent.forward_s + spent.backward_s
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def step_spent(self, stage: int) -> dict[Kind, Spent]:
        """What all computes of a step on a stage take by kind; recomputing counts as forward."""
        cost, runs = self.costs[stage], self.runs[stage]
        forward = float(runs[ActionKind.FORWARD])
        if cost.forward_s:
            forward += runs[ActionKind.RECOMPUTE] * cost.recompute_s / cost.forward_s
        backward = float(runs[ActionKind.BACKWARD])
        if cost.backward_s:
            halves_s = runs[ActionKind.INPUT_GRAD] * cost.input_grad_s
            halves_s += runs[ActionKind.WEIGHT_GRAD] * cost.weight_grad_s
            backward += halves_s / cost.backward_s
        spent = self.stages[stage].spent
        return {kind: found.scaled(forward, backward) for kind, found in spent.items()}

    @cached_property
    def counts(self) -> Counter[Kind]:
        """The nodes of each kind."""
        found: Counter[Kind] = Counter()
        for stage in self.stages:
            found.update(stage.counts)
        return found


def attribute(lowered: Lowered, cluster: Cluster, costs: Sequence[StageCost]) -> Attribution:
    """The costs of the stages, shared out among their nodes."""
    schedule = lowered.schedule
    runs: list[Counter[ActionKind]] = [Counter() for _ in costs]
    for order in schedule.orders:
        for action in order:
            runs[action.stage][action.kind] += 1
    nodes = {node.name: node for node in lowered.loss.graph.nodes}
    stages = []
    devices = stage_devices(cluster, lowered.plan.mesh, lowered.plan.rank_of)
    for local, cost, device in zip(lowered.stages.local, costs, devices, strict=True):
        kinds = {n.name: _kind(n, nodes, lowered.stages.sharding) for n in local.nodes}
        place = place_on(cluster, lowered.plan.tp, device, cp=lowered.plan.cp)
        spent, collectives = _spent(local, kinds, place)
        forward_s = sum(s.forward_s for s in spent.values())
        backward_s = sum(s.backward_s for s in spent.values())
        forward = cost.forward_s / forward_s if forward_s else 0.0
        backward = cost.backward_s / backward_s if backward_s else 0.0
        scaled = {kind: found.scaled(forward, backward) for kind, found in spent.items()}
        stages.append(StageTime(scaled, Counter(kinds.values()), collectives))
    return Attribution(stages, runs, costs)


def _kind(node: Node, nodes: Mapping[str, Node], sharding: Sharding) -> Kind:
    """Collectives that were put in belong to the node whose result they move."""
    known = node
    if not node.source:
        known = nodes.get(node.name.removeprefix("act:").split(".")[0].split(":")[0], node)
    op = node.op
    for prefix in _PREFIXES:
        op = op.removeprefix(prefix)
    module = name_pattern(node.module or known.module)
    return Kind(module, op.partition(".")[0], known.source, _layout(node, sharding))


def _layout(node: Node, sharding: Sharding) -> str:
    """How the result lies over tp; of what has no layout of its own, the shape of a rank's part."""
    ref = Ref(node.name)
    part = sharding.sequence_with(node.name)
    layouts = part.layouts if part else sharding.layouts
    spec = node.outputs[0] if node.outputs else None
    if ref in layouts:
        text = str(layouts[ref])
        summed = " partial sums" if node.name in sharding.partial else ""
        return (text or "scalar") + summed
    return " x ".join(map(str, spec.shape)) or "scalar" if spec else "-"


def _spent(
    local: Graph, kinds: Mapping[str, Kind], place: Place
) -> tuple[dict[Kind, Spent], Counter[Kernel]]:
    """Relative seconds by kind of node, and the collectives, with the model that the stage has."""
    order = list(dict.fromkeys(kinds.values()))
    number = {kind: k for k, kind in enumerate(order)}
    of = {name: number[kind] for name, kind in kinds.items()}
    works = parts_work(local, of, len(order))
    collectives: Counter[Kernel] = Counter()
    for work in works:
        for kernels in (work.forward, work.backward):
            found = {k: n for k, n in kernels.items() if k.kind is KernelKind.COLLECTIVE}
            collectives.update(found)
    return {k: _on_place(w, place) for k, w in zip(order, works, strict=True)}, collectives


def _on_place(work: Work, place: Place) -> Spent:
    forward_s, forward_wire_s = _kernel_seconds(work.forward, place)
    backward_s, backward_wire_s = _kernel_seconds(work.backward, place)
    return Spent(forward_s, backward_s, forward_wire_s, backward_wire_s)


def _kernel_seconds(kernels: Mapping[Kernel, int], place: Place) -> tuple[float, float]:
    """Seconds of kernels, and of the collectives among them."""
    compute_s = wire_s = 0.0
    for kernel, count in kernels.items():
        if kernel.kind is KernelKind.COLLECTIVE:
            wire_s += count * collective_seconds(kernel, place)
        else:
            compute_s += count * kernel_seconds(kernel, place.device)
    return compute_s + wire_s, wire_s
