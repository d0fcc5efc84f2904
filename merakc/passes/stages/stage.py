"""Pipeline stages: which stage runs which node, and each stage's own graph.

Values that are cheap to make from the batch alone (masks, position tables) belong to no stage:
every stage that reads one makes it itself. All other values that cross a stage boundary are
transfers, straight from the stage that makes them to every stage that reads them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from merakc.costs.device import place_on
from merakc.costs.nodes import node_seconds
from merakc.costs.stage import rough_seconds
from merakc.costs.work.flops import node_flops
from merakc.errors import CutError, PlanError
from merakc.ir.graph import Graph, Input, InputKind, Node, Output, OutputKind, Ref
from merakc.ir.plan import StageRun
from merakc.ir.program import Transfer
from merakc.ir.report import CutReport
from merakc.ir.same import Same
from merakc.machines.cluster import Cluster, Device
from merakc.passes.forward.activations import with_activations
from merakc.passes.forward.grouped_heads import with_grouped_heads
from merakc.passes.forward.scores import without_scores
from merakc.passes.sharding.experts.dispatch import uncut
from merakc.passes.sharding.layouts import Sharding
from merakc.passes.sharding.spmd import spmd_partition
from merakc.passes.stages.cut import CutProblem, cut

# How many times larger than the parameters behind it a value is for stages to make it themselves.
MIN_GROWTH = 4
# How much heavier than need be the heaviest stage may be for fewer bytes between stages; more than
# the first only where the cores that compute carry messages.
TOLERANCES = (0.03, 0.1, 0.3)
# Inputs that every stage can have for nothing.
EVERYWHERE = (
    InputKind.BATCH, InputKind.BUFFER, InputKind.CONSTANT, InputKind.SCALAR, InputKind.KNOWN,
)  # fmt: skip


@dataclass(frozen=True)
class Stages:
    """The stage of every node that has one, the graph of each stage, what passes between them."""

    of: Mapping[str, int]
    graphs: tuple[Graph, ...]
    transfers: tuple[Transfer, ...]
    sharding: Sharding  # with the layouts of what crosses, under its name at the receiver

    @property
    def head(self) -> int | None:
        """The stage that hands the waist over to what runs once for the whole batch, if any."""
        of_waist = (s for s, g in enumerate(self.graphs) for o in g.outputs
                    if o.kind is OutputKind.WAIST)  # fmt: skip
        return next(of_waist, None)

    @cached_property
    def local(self) -> tuple[Graph, ...]:
        """The graph of each stage on the first lane, which holds no less than any other rank."""
        return tuple(called(spmd_partition(graph, self.sharding, 0)) for graph in self.graphs)

    def without_nodes(self, same: Same) -> Stages:
        """What goes in and out of the stages, with the `same` values as others have."""
        graphs = tuple(graph.without_nodes(same) for graph in self.graphs)
        return Stages({}, graphs, self.transfers, Sharding(self.sharding.tp, {}, frozenset(), ()))


def called(local: Graph, least_bytes: float | None = None) -> Graph:
    """A lane's forward as its calls run one by one; for `least_bytes` see `without_scores`."""
    return with_activations(without_scores(with_grouped_heads(local), least_bytes))


WHOLE = CutReport("dp", 1.0, 1.0, cut_bytes=0, metis_load=1.0, metis_cut_bytes=0, metis_moves=0)


def shared_nodes(graph: Graph, *, trained: bool = True) -> set[str]:
    """The nodes that any stage may repeat: no product and no dropout behind them.

    With `trained`, a value made from parameters alone that together are far smaller than it
    (T5's position bias) is one too: each stage that reads it holds those parameters, makes it
    itself, and their gradients are summed over the stages.
    """
    written = {o.name for o in graph.outputs if o.kind is OutputKind.BUFFER}
    free = {i.name for i in graph.inputs if i.kind in EVERYWHERE and i.target not in written}
    parameters = {i.name: i for i in graph.inputs if i.kind is InputKind.PARAMETER and trained}
    specs = graph.specs()
    found: set[str] = set()
    behind = {name: frozenset((name,)) for name in parameters}  # parameters, and calls on them
    for node in graph.nodes:
        reads = {r.node for r in node.refs}
        if not reads <= free | found | behind.keys():
            continue
        if node_flops(node, specs) or node.op == "merakc.dropout.default":
            continue
        behind[node.name] = frozenset((node.name,)).union(*(behind.get(n, ()) for n in reads))
        held_bytes = sum(
            parameters[n].spec.size_bytes for n in behind[node.name] & parameters.keys()
        )
        made_bytes = sum(o.size_bytes for o in node.outputs if o is not None)
        if held_bytes * MIN_GROWTH <= made_bytes:
            found |= behind[node.name] - parameters.keys()
    return found


def update_nodes(graph: Graph) -> dict[str, str]:
    """The nodes that only serve the new value of a buffer, each with the node it stays beside.

    That is the first other node of its module: BatchNorm's statistics stay with the BatchNorm.
    """
    kept = tuple(o for o in graph.outputs if o.kind is not OutputKind.BUFFER)
    needed = {n.name for n in replace(graph, outputs=kept).pruned().nodes}
    homes: dict[str, str] = {}
    for node in graph.nodes:
        if node.name in needed:
            homes.setdefault(node.module, node.name)
    return {n.name: homes.get(n.module, "") for n in graph.nodes if n.name not in needed}


def assign_stages(
    graph: Graph, sharding: Sharding, stages: int, cluster: Cluster, devices: Sequence[Device] = ()
) -> tuple[dict[str, int], CutReport]:
    """Cuts the graph into `stages` stages of even time, on the `devices` of each where they differ.

    Raises `CutError` where it cannot.
    """
    shared, updates = shared_nodes(graph), update_nodes(graph)
    nodes = [n for n in graph.nodes if n.name not in shared and n.name not in updates]
    if stages == 1 and nodes:
        of = dict.fromkeys((n.name for n in graph.nodes if n.name not in shared), 0)
        return of, WHOLE
    position = {n.name: k for k, n in enumerate(nodes)}
    specs = graph.specs()
    local = {ref: sharding.local_spec(ref, spec, 0) for ref, spec in specs.items()}
    sizes = {
        n.name: sum(local[Ref(n.name, k)].size_bytes for k, o in enumerate(n.outputs) if o)
        for n in nodes
    }
    edges = {
        (position[r.node], position[n.name], sizes[r.node])
        for n in nodes
        for r in n.refs
        if r.node in position
    }

    place = place_on(cluster, sharding.tp, cp=sharding.cp)

    def seconds(node: Node) -> float:
        return node_seconds(sharding.evened(node), sharding.node_specs(node, specs, 0), place)

    weights_s = [seconds(n) for n in nodes]
    for node in graph.nodes:
        if updates.get(node.name) in position:
            weights_s[position[updates[node.name]]] += seconds(node)
    differentiated = {ref.node for ref in graph.grad_values()}
    prices = {
        k: _message_bytes(sizes[name], name in differentiated, cluster)
        for name, k in position.items()
    }
    problem = CutProblem(tuple(weights_s), tuple(sorted(edges)), uncut(position, sharding), prices)
    speeds, by_cores = _speeds(graph, sharding, cluster, devices), place.fabric.by_cores
    cuts = [
        cut(problem, stages, tolerance=tolerance, speeds=speeds)
        for tolerance in (TOLERANCES if by_cores else TOLERANCES[:1])
    ]
    found, report = min(cuts, key=lambda one: _stage_seconds(problem, one[0], one[1], cluster))
    of = {n.name: s for n, s in zip(nodes, found, strict=True)}
    beside = {name: of.get(home, 0) for name, home in updates.items() if name not in shared}
    while _place_updates(graph, of, beside):
        pass
    _join_states(graph, of)
    return {n.name: of[n.name] for n in graph.nodes if n.name in of}, report


def _message_bytes(size_bytes: int, differentiated: bool, cluster: Cluster) -> int:
    """What a value costs to send, in bytes of a link: its latency, too, and the gradient's way."""
    latency_bytes = round(cluster.link_latency_s * cluster.link_bytes_per_s)
    return (size_bytes + latency_bytes) * (1 + differentiated)


def _stage_seconds(
    problem: CutProblem, of: Sequence[int], report: CutReport, cluster: Cluster
) -> float:
    """Seconds of a micro-batch on the heaviest stage, and of the messages of an average one, where
    one takes both of its ends.
    """
    stages = max(of) + 1
    sent = {(a, of[b]) for a, b, _ in problem.edges if of[a] != of[b]}
    sent_bytes = sum(problem.prices[a] for a, _ in sent)
    return (
        report.load * sum(problem.weights_s) + 2 * sent_bytes / cluster.link_bytes_per_s
    ) / stages


def _speeds(
    graph: Graph, sharding: Sharding, cluster: Cluster, devices: Sequence[Device]
) -> list[float] | None:
    """How often a second each device runs the whole graph; None where they are alike."""
    if len(kinds := dict.fromkeys(devices)) < 2:
        return None
    local = spmd_partition(graph, sharding, 0)
    places = {d: place_on(cluster, sharding.tp, d, cp=sharding.cp) for d in kinds}
    seconds = {d: sum(rough_seconds(local, place)) for d, place in places.items()}
    return [1.0 / seconds[device] for device in devices]


def _place_updates(graph: Graph, of: dict[str, int], beside: Mapping[str, int]) -> bool:
    """Puts updates of buffers no earlier than `beside`, than what they read, and than the last
    update of a buffer that they read; whether a buffer's last update was moved by that.

    A module that is called twice, on both sides of a cut, updates its buffers on the later side.
    """
    written = {o.name: o.ref.node for o in graph.outputs if o.kind is OutputKind.BUFFER}
    buffers = [i for i in graph.inputs if i.kind is InputKind.BUFFER]
    last = {i.name: written[i.target] for i in buffers if i.target in written}
    before = {name: of.get(name, 0) for name in last.values()}
    for node in graph.nodes:
        if node.name in beside:
            reads = {r.node for r in node.refs} | {last.get(r.node, "") for r in node.refs}
            of[node.name] = max(beside[node.name], *(of.get(name, 0) for name in reads))
    return before != {name: of.get(name, 0) for name in before}


def _join_states(graph: Graph, of: dict[str, int]) -> None:
    """Puts what makes the new value of a buffer where its old value is first read, if no batch is
    in it: the power iterations of spectral norms, run once for each call.
    """
    producers = {n.name: n for n in graph.nodes}
    kinds = {i.name: i for i in graph.inputs}
    for out in graph.outputs:
        behind, pending = set[str](), [out.ref.node]
        while pending and out.kind is OutputKind.BUFFER:
            name = pending.pop()
            if name not in behind:
                behind.add(name)
                pending += [r.node for r in producers[name].refs] if name in producers else []
        inputs = [kinds[name] for name in behind if name in kinds]
        if any(i.kind is InputKind.BATCH for i in inputs):
            continue
        own = next((i.name for i in inputs if i.target == out.name), None)
        if own is None:
            continue
        reading = [of[n.name] for n in graph.nodes if n.name in of and Ref(own) in n.refs]
        for name in behind & of.keys():
            of[name] = min([of[name], *reading])


def stage_runs(graph: Graph, of: Mapping[str, int]) -> tuple[StageRun, ...]:
    """The assignment as runs of consecutive nodes."""
    runs: list[list[Node]] = []
    for node in graph.nodes:
        if node.name not in of:
            continue
        if not runs or of[runs[-1][-1].name] != of[node.name]:
            runs.append([])
        runs[-1].append(node)
    return tuple(
        StageRun(of[r[0].name], r[0].name, r[-1].name, r[0].module, r[-1].module) for r in runs
    )


def stages_of_runs(graph: Graph, runs: tuple[StageRun, ...]) -> dict[str, int]:
    """The inverse of `stage_runs` on the same graph."""
    shared = shared_nodes(graph)
    found: dict[str, int] = {}
    pending = iter(runs)
    run: StageRun | None = None
    for node in graph.nodes:
        if node.name in shared:
            continue
        if run is None:
            run = next(pending, None)
            if run is None or run.first_node != node.name:
                raise PlanError(
                    f"the plan's stages do not fit the graph: node '{node.name}' of module "
                    f"'{node.module}' begins no stage; make the plan again"
                )
        found[node.name] = run.stage
        if node.name == run.last_node:
            run = None
    return found


def split_stages(graph: Graph, of: Mapping[str, int], stages: int, sharding: Sharding) -> Stages:
    """The graph of each stage, and the transfers between them.

    The whole waist leaves the last stage that makes any of it, to which what others make travels.

    Raises `CutError` where one stage would write a buffer that another reads.
    """
    ends = {o: of.get(o.ref.node, stages - 1) for o in graph.outputs}
    waist = [o for o in graph.outputs if o.kind is OutputKind.WAIST]
    made = [of[o.ref.node] for o in waist if o.ref.node in of]
    ends |= dict.fromkeys(waist, max(made, default=stages - 1))
    readers, kept = _reads(graph, of, ends, stages)
    _check_buffers(graph, ends, kept)
    specs, differentiated = graph.specs(), _differentiated(graph, of, ends)
    graphs, transfers = [], []
    for stage in range(stages):
        arriving = [r for r, to in readers.items() if stage in to]
        sent = [r for r in readers if of[r.node] == stage]
        names = {r: Ref(value_name(r)) for r in arriving}
        own = tuple(i for i in graph.inputs if i.name in kept[stage])
        own += tuple(
            Input(to.node, InputKind.ACTIVATION, specs[r], to.node, (r, stage) in differentiated)
            for r, to in names.items()
        )
        nodes = tuple(n for n in graph.nodes if of.get(n.name) == stage or n.name in kept[stage])
        outputs = tuple(o for o in graph.outputs if ends[o] == stage)
        outputs += tuple(Output(value_name(r), OutputKind.ACTIVATION, r) for r in sent)
        constants = {k: v for k, v in graph.constants.items() if k in kept[stage]}
        graphs.append(Graph(own, nodes, outputs, constants, graph.functions).renamed(names))
        for ref in sent:
            size_bytes = sharding.local_spec(ref, specs[ref], 0).size_bytes
            transfers += [
                Transfer(value_name(ref), stage, to, size_bytes, (ref, to) in differentiated)
                for to in sorted(readers[ref])
            ]
    named = sharding.renamed({r: Ref(value_name(r)) for r in readers})
    return Stages(of, tuple(graphs), tuple(transfers), named)


def _reads(
    graph: Graph, of: Mapping[str, int], ends: Mapping[Output, int], stages: int
) -> tuple[dict[Ref, set[int]], list[set[str]]]:
    """The other stages that read each value; the inputs and repeated nodes of each stage."""
    shared = {n.name: n for n in graph.nodes if n.name not in of}
    readers: dict[Ref, set[int]] = {}
    kept: list[set[str]] = [set() for _ in range(stages)]

    def read(ref: Ref, stage: int) -> None:
        if ref.node in of:
            if of[ref.node] != stage:
                readers.setdefault(ref, set()).add(stage)
        elif ref.node not in kept[stage]:
            kept[stage].add(ref.node)
            if ref.node in shared:
                for inner in shared[ref.node].refs:
                    read(inner, stage)

    for node in graph.nodes:
        if node.name in of:
            for ref in node.refs:
                read(ref, of[node.name])
    for out, stage in ends.items():
        read(out.ref, stage)
    return readers, kept


def _check_buffers(graph: Graph, ends: Mapping[Output, int], kept: list[set[str]]) -> None:
    """A stage reads its own copy of a buffer: a write elsewhere would not reach it."""
    names = {i.target: i.name for i in graph.inputs if i.kind is InputKind.BUFFER}
    for out, writer in ends.items():
        if out.kind is OutputKind.BUFFER and out.name in names:
            reading = [s for s, held in enumerate(kept) if names[out.name] in held and s != writer]
            if reading:
                raise CutError(
                    f"buffer '{out.name}' is written by stage {writer} and read by stages "
                    f"{reading}; use fewer pipeline stages"
                )


def value_name(ref: Ref) -> str:
    """The name under which a value crosses a stage boundary."""
    return f"act:{ref.node}" if ref.index == 0 else f"act:{ref.node}:{ref.index}"


def _differentiated(
    graph: Graph, of: Mapping[str, int], ends: Mapping[Output, int]
) -> set[tuple[Ref, int]]:
    """The values that have a gradient, each with the stages whose own nodes give it a part."""
    grads = graph.grad_values()
    found = {(o.ref, s) for o, s in ends.items() if o.kind.begins_gradients and o.ref in grads}
    needed = {ref.node for ref, _ in found}
    for node in reversed(graph.nodes):
        if node.name in needed and node.grad and ".detach" not in node.op:
            reads = grads.intersection(node.refs)
            needed.update(ref.node for ref in reads)
            found.update((ref, of.get(node.name, -1)) for ref in reads)
    return found
