"""Products with weights in float8, where the precision of a step says so.

A product with a weight becomes `merakc::scaled_linear` where its dims are multiples of 16, which
the kernels ask for, and it is of the dtype that is computed in. Its rows must be of samples: what
is the same for all of them gets a part of its gradient from every micro-batch, each rounded by
itself. Left as they are, as torchao and Transformer Engine leave them:

- products behind which there is no other, as those of classes and scores: rounding them is rounding
  the loss;
- products whose values choose, as a router's: what is compared or sorted before the next product;
- products of two activations, of groups of rows, of convolutions, and in modules that run as they
  are.

A weight is in float8 in all of its products, or in none. Which are is told of the whole recorded
forward, before it is divided: it does not depend on ranks, stages or micro-batches.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

import torch

from merakc.analysis.aliases import is_view, view_roots
from merakc.costs.work.flops import node_flops
from merakc.ir.batches import BatchSplit
from merakc.ir.graph import Graph, InputKind, Node, Ref, TensorSpec
from merakc.kernels.float8.scaled import MULTIPLE, SCALED_LINEAR
from merakc.passes.batches.states import Kind, State

ADD, TURN = "aten.add.Tensor", "aten.t.default"
LINEAR, ADDMM = "aten.linear.default", "aten.addmm.default"
# Where rows and the weight are among the arguments.
PLACES = {LINEAR: (0, 1), ADDMM: (1, 2), "aten.mm.default": (0, 1), "aten.matmul.default": (0, 1)}
CASTS = frozenset({"aten.to.dtype", "aten._to_copy.default"})


def scaled_weights(
    graph: Graph, dtype: torch.dtype, states: Mapping[Ref, State] | None
) -> frozenset[str]:
    """The names of the weights of a whole forward whose products are to be in float8. `states` say
    what values have samples; None of a batch that is never divided.
    """
    inputs = {i.name: i.target for i in graph.inputs if i.kind is InputKind.PARAMETER}
    roots = view_roots(graph, lambda node, _: is_view(node) or node.op in CASTS)
    kept, found = _kept(graph), dict[str, bool]()
    for node in graph.nodes:
        for ref in node.refs:
            name = inputs.get(roots.get(ref, ref).node)
            if name is None or not node_flops(node, graph.specs()):
                continue
            fits = node.name not in kept and _fits(node, ref, graph, dtype)
            fits = fits and (states is None or _has_rows(states.get(Ref(node.name))))
            found[name] = fits and found.get(name, True)
    return frozenset(name for name, fits in found.items() if fits)


def _kept(graph: Graph) -> set[str]:
    """The nodes behind which there is no product, and those that something is chosen by before the
    next one.
    """
    specs, kept = graph.specs(), set[str]()
    reaches, chooses = set[str](), set[str]()  # nodes before a product, and before a choice
    for node in reversed(graph.nodes):
        is_product = bool(node_flops(node, specs))
        if node.name not in reaches or node.name in chooses:
            kept.add(node.name)
        chosen = any(o is not None and not o.dtype.is_floating_point for o in node.outputs)
        for ref in node.refs:
            if is_product or node.name in reaches:
                reaches.add(ref.node)
            if chosen or (node.name in chooses and not is_product):
                chooses.add(ref.node)
    return kept


def _has_rows(state: State | None) -> bool:
    return state is not None and state.kind is Kind.ROWS


def _fits(node: Node, weight: Ref, graph: Graph, dtype: torch.dtype) -> bool:
    """Whether a node is a product of rows with a weight of these sizes, all of the dtype."""
    if node.op not in PLACES or node.kwargs:
        return False
    x, w = (node.args[place] for place in PLACES[node.op])
    if w != weight or x == w:
        return False
    specs = graph.specs()
    read, held = specs[x], specs[w]
    sizes = len(read.shape) > 1 and len(held.shape) == 2 and held.shape
    alike = {read.dtype, held.dtype, node.spec.dtype} == {dtype}
    return bool(sizes) and alike and all(size % MULTIPLE == 0 for size in held.shape)


def with_scaled_products(split: BatchSplit) -> BatchSplit:
    """The step of a batch with its products of the `scaled` weights in float8."""
    if not split.scaled:
        return split
    head = split.head and replace(split.head, graph=_written(split.head.graph, split.scaled))
    return replace(split, graph=_written(split.graph, split.scaled), head=head)


def _written(graph: Graph, weights: Collection[str]) -> Graph:
    inputs = {i.name for i in graph.inputs if i.target in weights}
    roots = view_roots(graph, lambda node, _: is_view(node) or node.op in CASTS)
    nodes: list[Node] = []
    for node in graph.nodes:
        weight = node.args[PLACES[node.op][1]] if node.op in PLACES else None
        own = weight is not None and roots.get(weight, weight).node in inputs
        nodes += _scaled(node, graph) if own else [node]
    return graph.with_nodes(nodes)


def _scaled(node: Node, graph: Graph) -> Iterator[Node]:
    """A product in float8, and what stands around it."""
    x, w = (node.args[place] for place in PLACES[node.op])
    bias = {LINEAR: node.args[2:3], ADDMM: node.args[:1]}.get(node.op, ())
    bias = tuple(ref for ref in bias if ref is not None)
    if node.op != LINEAR:
        spec = graph.specs()[w]
        turned = (TensorSpec(spec.shape[::-1], spec.dtype),)
        yield replace(node, name=f"{node.name}.turned", op=TURN, args=(w,), outputs=turned)
        w = Ref(f"{node.name}.turned")
    name = f"{node.name}.product" if bias else node.name
    yield replace(node, name=name, op=SCALED_LINEAR, args=(x, w))
    for ref in bias:
        yield replace(node, op=ADD, args=(Ref(name), ref))
