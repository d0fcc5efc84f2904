"""The end of a forward, behind its last layers, small enough to be computed with numbers.

What the layers make becomes inputs, whose states are known; what follows is the loss. Dims that no
size among the arguments names, and that hold no samples, are shrunk: the classes of a vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from merakc.ir.graph import Graph, Input, InputKind, Node, Output, Ref, TensorSpec
from merakc.passes.batches.analyse import Analysis
from merakc.passes.batches.normalise import CROSS_ENTROPY, FULL
from merakc.passes.batches.states import SAMPLES, Kind, State
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
        return kept.renamed(cut)

    part, whole = _with_read_inputs(behind(found.part), behind(found.whole))
    recorded = behind(found.recorded) if layers and found.recorded else None
    recorded = recorded and recorded.without_unread_inputs()
    states = {**found.states, **{now: found.states[ref] for ref, now in cut.items()}}
    return with_graphs(replace(found, states=states), part, whole, recorded)


def _with_read_inputs(part: Graph, whole: Graph) -> tuple[Graph, Graph]:
    """Both with the inputs that one of them reads: what is known of the whole batch may be computed
    from some that no part reads.
    """
    read = {i.name for g in (part, whole) for i in g.without_unread_inputs().inputs}

    def kept(graph: Graph) -> Graph:
        inputs = tuple(i for i in graph.inputs if i.name in read)
        constants = {name: c for name, c in graph.constants.items() if name in read}
        return replace(graph, inputs=inputs, constants=constants)

    return kept(part), kept(whole)


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
    graphs = (found.part, found.whole)
    factors = [propagate(graph) for graph in graphs]
    fixed = [_all_fixed(*of, states) for of in zip(graphs, factors, strict=True)]
    while _share(graphs, factors, fixed):
        pass
    part, whole = map(_resized, graphs, factors, fixed)
    specs = whole.specs()
    for ref, state in found.states.items():
        if ref in specs and state.dims is not None:
            now = zip(state.dims, specs[ref].shape, strict=True)
            states[ref] = state._replace(
                dims=tuple(d if SAMPLES in d or d == () else (n,) for d, n in now)
            )
    return with_graphs(replace(found, states=states), part, whole)


def _all_fixed(graph: Graph, dims: Dims, states: Mapping[Ref, State]) -> set[Factor]:
    """The factors that keep their size."""
    fixed = {f for node in graph.nodes for f in _fixed(dims, node)}
    fixed |= {f for i in graph.inputs for f in _fixed_input(dims, i, graph)}
    for ref in dims.of:
        for k, dim in enumerate(states[ref].dims or ((SAMPLES,),) * len(dims.of[ref])):
            fixed |= set(leaves(dims.of[ref][k])) if SAMPLES in dim else set()
    return fixed


def _share(graphs: Sequence[Graph], factors: Sequence[Dims], fixed: Sequence[set[Factor]]) -> bool:
    """Fixes in both graphs the dims of inputs that one of them fixes; whether there were any."""
    before = sum(map(len, fixed))
    own = {i.name for i in graphs[0].inputs} & {i.name for i in graphs[1].inputs}
    for ref in map(Ref, own):
        for both in zip(*(dims.of[ref] for dims in factors), strict=True):
            one, other = map(leaves, both)
            pairs = [((a,), (b,)) for a, b in zip(one, other, strict=False)]
            for mine, its in pairs if len(one) == len(other) else [(one, other)]:
                if fixed[0].intersection(mine) or fixed[1].intersection(its):
                    fixed[0].update(mine)
                    fixed[1].update(its)
    return sum(map(len, fixed)) > before


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
