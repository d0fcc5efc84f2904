"""Key and value heads for more tp ranks than there are: each rank takes copies of those it reads.

Where queries share heads of keys and values in groups, the heads of all three are split together,
or the queries of each group are. Where neither has as many parts as there are ranks, the key and
value heads are looked up per query head, so that the queries' heads can be split by themselves:
every rank makes all key and value heads and picks its own, as Megatron-LM does by copying weights.

A mask for each head that comes with the batch is copied, so that a rank can take its heads of it.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from merakc.ir.graph import Graph, Input, InputKind, Node, Ref, TensorSpec
from merakc.passes.sharding.dims import Dims
from merakc.passes.sharding.factors import atoms
from merakc.passes.sharding.propagate import COPY, propagate

ATTENTION = "merakc.attention.default"
HEADS_DIM = 1


def separate_heads(graph: Graph, tp: int) -> Graph:
    """The same function, with attentions whose query heads alone can be split over `tp` ranks."""
    if tp == 1 or not any(n.op == ATTENTION for n in graph.nodes):
        return graph
    graph = _with_own_masks(graph)
    dims = propagate(graph)
    specs = graph.specs()
    inputs, constants = list(graph.inputs), dict(graph.constants)
    nodes: list[Node] = []
    for node in graph.nodes:
        if node.op == ATTENTION and _needs_copies(dims, node, tp):
            query, key, value = node.args[:3]
            heads, groups = (specs[r].shape[HEADS_DIM] for r in (query, key))
            index = torch.arange(groups).repeat_interleave(heads // groups)
            name = f"{node.name}.heads"
            inputs.append(Input(name, InputKind.CONSTANT, TensorSpec((heads,), index.dtype)))
            constants[name] = index
            copies = {ref: _looked_up(node, ref, name, specs[ref]) for ref in (key, value)}
            nodes += copies.values()
            refs = [Ref(copies[ref].name) for ref in (key, value)]
            nodes.append(replace(node, args=(query, *refs, *node.args[3:])))
        else:
            nodes.append(node)
    return replace(graph, inputs=tuple(inputs), nodes=tuple(nodes), constants=constants)


def _with_own_masks(graph: Graph) -> Graph:
    """The graph with copies of masks of the batch's that have several heads."""
    specs, nodes = graph.specs(), list[Node]()
    batch = {Ref(i.name) for i in graph.inputs if i.kind is InputKind.BATCH}
    for node in graph.nodes:
        mask = node.args[3] if node.op == ATTENTION else None
        if mask in batch and specs[mask].shape[HEADS_DIM] > 1:
            name = f"{node.name}.mask"
            nodes.append(
                replace(node, name=name, op=COPY, args=(mask,), kwargs=(), outputs=(specs[mask],))
            )
            node = node.reading((*node.args[:3], Ref(name), *node.args[4:]), node.kwargs)
        nodes.append(node)
    return graph.with_nodes(nodes)


def _needs_copies(dims: Dims, node: Node, tp: int) -> bool:
    """Whether there are enough query heads, but no factor of them that could be split."""
    heads = dims.of[node.args[0]][HEADS_DIM]
    enough = dims.shapes[node.args[0]][HEADS_DIM] >= tp
    return enough and not any(f.size >= tp and not f.blocked for f in atoms(heads))


def _looked_up(node: Node, ref: Ref, index: str, spec: TensorSpec) -> Node:
    """Key or value `[b, heads, t, d]`, one head for each of the queries."""
    batch, _, *rest = spec.shape
    heads = node.outputs[0].shape[HEADS_DIM] if node.outputs[0] else 0
    return replace(
        node,
        name=f"{node.name}.{ref.node}{f'.{ref.index}' if ref.index else ''}",
        op="aten.index.Tensor",
        args=(ref, (None, Ref(index))),
        kwargs=(),
        outputs=(TensorSpec((batch, heads, *rest), spec.dtype),),
    )
