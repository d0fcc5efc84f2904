"""The end of a forward, behind its last layers, small enough to be computed with numbers.

What the layers make becomes inputs, whose states are known; what follows is the loss. Dims that no
size among the arguments names, and that hold no samples, are shrunk: the classes of a vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from merakc.ir.graph import Graph, Input, InputKind, Node, Output, Ref, TensorSpec
from merakc.passes.batches.analyse import Analysis
from merakc.passes.batches.normalise import CROSS_ENTROPY, FULL
from merakc.passes.batches.states import SAMPLES, Kind
from merakc.passes.batches.waist import is_unseen, is_work, of_parameters
from merakc.passes.sharding.dims import Dims, given
from merakc.passes.sharding.factors import Factor, leaves
from merakc.passes.sharding.propagate import propagate
from merakc.passes.sharding.rows import POINTWISE, Along, Reduce
from merakc.passes.sharding.rules import row_of

SHRUNK = 2  # the size of a dim that is shrunk: one that still has a first and another element
# Calls that take sizes, which are those of their result.
SIZED = {"aten.reshape.default": 1, "aten.expand.default": 1, FULL: 0, "aten.zeros.default": 0,
         "aten.ones.default": 0}  # fmt: skip
# Calls whose arguments say nothing of sizes, beside those that are pointwise or reduce.
SIZELESS = frozenset(
    f"aten.{name}"
    for name in [
        "matmul.default",
        "mm.default",
        "bmm.default",
        "transpose.int",
        "permute.default",
        "t.default",
        "unsqueeze.default",
        "linear.default",
        "stack.default",
    ]
)


def tail(found: Analysis, loss: Output, *, layers: bool = False) -> Analysis:
    """What was found of the nodes behind the last layers, whose values are inputs; with `layers`,
    of these too. What no rule looks into, or is so by convention, is never part of it.
    """
    made = of_parameters(found)

    def is_before(ref: Ref) -> bool:
        node, state = found.makers.get(ref.node), found.states.get(ref)
        if node is None or state is None or state.routed or state.known:
            return False
        before = is_unseen(node) if layers else is_work(found, node, made)
        fits = state.rows is not None or state.kind is Kind.CONSTANT
        return fits and (before or bool(found.outcomes[node.name].assumed))

    cut: dict[Ref, Ref] = {}

    def behind(graph: Graph) -> Graph:
        specs, makers = graph.specs(), {n.name: n for n in graph.nodes}
        keep: set[str] = set()
        own: dict[Ref, None] = {}
        waiting = [loss.ref]
        while waiting:
            ref = waiting.pop()
            node = makers.get(ref.node)
            if node is None or node.name in keep:
                continue
            if is_before(ref):
                own[ref] = None
                cut[ref] = Ref(f"{ref.node}.{ref.index}.cut")
            else:
                keep.add(node.name)
                waiting += node.refs
        inputs = [
            Input(cut[ref].node, InputKind.ACTIVATION, specs[ref], cut[ref].node, True)
            for ref in own
        ]
        nodes = tuple(n for n in graph.nodes if n.name in keep)
        kept = Graph((*graph.inputs, *inputs), nodes, (loss,), graph.constants, graph.functions)
        return kept.renamed(cut).without_unread_inputs()

    part, whole = behind(found.part), behind(found.whole)
    recorded = behind(found.recorded) if layers and found.recorded else None
    states = {**found.states, **{now: found.states[ref] for ref, now in cut.items()}}
    return with_graphs(replace(found, states=states), part, whole, recorded)


def with_graphs(
    found: Analysis, part: Graph, whole: Graph, recorded: Graph | None = None
) -> Analysis:
    """The same analysis of other graphs with the same names."""
    return replace(
        found, part=part, whole=whole, recorded=recorded,
        makers={n.name: n for n in part.nodes}, twins={n.name: n for n in whole.nodes},
    )  # fmt: skip


def shrunk(found: Analysis) -> Analysis:
    """The same with every dim shrunk that holds no samples and that no argument tells a size of."""
    states = dict(found.states)
    graphs = []
    for graph in (found.part, found.whole):
        dims = propagate(graph)
        fixed = {f for node in graph.nodes for f in _fixed(dims, node)}
        fixed |= {f for i in graph.inputs for f in _fixed_input(dims, i, graph)}
        for ref in dims.of:
            for k, dim in enumerate(states[ref].dims or ((SAMPLES,),) * len(dims.of[ref])):
                fixed |= set(leaves(dims.of[ref][k])) if SAMPLES in dim else set()
        graphs.append(_resized(graph, dims, fixed))
        specs = graphs[-1].specs()
    for ref, state in found.states.items():
        if ref in specs and state.dims is not None:
            now = zip(state.dims, specs[ref].shape, strict=True)
            states[ref] = state._replace(
                dims=tuple(d if SAMPLES in d or d == () else (n,) for d, n in now)
            )
    return with_graphs(replace(found, states=states), *graphs)


def _fixed_input(dims: Dims, item: Input, graph: Graph) -> Iterator[Factor]:
    if item.name in graph.constants:
        for dim in dims.of[Ref(item.name)]:
            yield from leaves(dim)


def _fixed(dims: Dims, node: Node) -> Iterator[Factor]:
    """The factors that a node needs in their size."""
    row = row_of(node.op)
    refs = [*node.refs, *node.made]
    if row == POINTWISE or isinstance(row, Reduce) or node.op in SIZELESS or node.op in SIZED:
        chosen: Mapping[Ref, Collection[int]] = {}
    elif node.op == CROSS_ENTROPY:
        scores = dims.of[node.args[0]]
        classes = 1 if len(scores) > 1 else 0
        chosen = {r: set(range(len(dims.of[r]))) for r in refs}
        if given(node, "weight") is None and len(dims.of[node.args[1]]) < len(scores):
            chosen = {**chosen, node.args[0]: set(range(len(scores))) - {classes}}
    elif isinstance(row, Along) and "softmax" in node.op:
        chosen = {}
    elif node.op == "aten.slice.Tensor":
        chosen = {r: {given(node, "dim") % len(dims.of[r])} for r in refs}
    else:
        chosen = {r: range(len(dims.of[r])) for r in refs}
    for ref, own in chosen.items():
        for k in own:
            yield from leaves(dims.of[ref][k])


def _resized(graph: Graph, dims: Dims, fixed: Collection[Factor]) -> Graph:
    def shape(ref: Ref) -> tuple[int, ...]:
        found = []
        for dim in dims.of[ref]:
            size = 1
            for factor in leaves(dim):
                whole = factor in fixed or bool(factor.segments)
                size *= factor.size if whole else min(factor.size, SHRUNK)
            found.append(size)
        return tuple(found)

    def spec(ref: Ref, before: TensorSpec | None) -> TensorSpec | None:
        return None if before is None else TensorSpec(shape(ref), before.dtype)

    inputs = tuple(
        replace(i, spec=TensorSpec(shape(Ref(i.name)), i.spec.dtype)) for i in graph.inputs
    )
    nodes = []
    for node in graph.nodes:
        outputs = tuple(spec(Ref(node.name, k), o) for k, o in enumerate(node.outputs))
        args = node.args
        if node.op in SIZED:
            at = SIZED[node.op]
            args = (*args[:at], shape(Ref(node.name)), *args[at + 1 :])
        nodes.append(replace(node, args=args, outputs=outputs))
    return replace(graph, inputs=inputs, nodes=tuple(nodes))
