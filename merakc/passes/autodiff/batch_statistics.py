"""Statistics of a batch norm by the call that normalises.

What is recorded computes mean and variance for the running ones, and torch's op computes them once
more for itself: one pass over what may be the largest tensors of a convolutional net, saved.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import torch

from merakc.ir.graph import Graph, Node, Ref
from merakc.ir.program import StageGraphs

NORM: Final = "aten.native_batch_norm.default"
STATISTICS: Final = "aten.var_mean.correction"
BOTH: Final = "merakc.batch_norm_statistics.default"
DTYPES: Final = (torch.float32, torch.float64)  # torch keeps statistics of others in float32


def with_statistics(stage: StageGraphs) -> StageGraphs:
    """The stage whose forward computes the same so; to be asked of it before it is split."""
    return replace(stage, forward=_rewritten(stage.forward))


def _rewritten(graph: Graph) -> Graph:
    given = {i.name for i in graph.inputs}
    norms: dict[Ref, Node] = {}
    for node in graph.nodes:
        if (
            node.op == NORM
            and _of_the_batch(node)
            and given.issuperset(r.node for r in node.refs[1:])
        ):
            norms.setdefault(node.refs[0], node)
    if not norms:
        return graph
    place = {node.name: k for k, node in enumerate(graph.nodes)}
    instead: dict[str, list[Node]] = {}
    now: dict[Ref, Ref] = {}
    for node in graph.nodes:
        norm = norms.get(node.refs[0]) if node.op == STATISTICS else None
        if norm is None or norm.name in instead or not _unbiased(node, norm):
            continue
        both = replace(
            norm, op=BOTH, args=(*norm.args[:3], norm.args[7]),
            outputs=(*norm.outputs, *node.outputs),
        )  # fmt: skip
        first, last = sorted((node, norm), key=lambda n: place[n.name])
        instead |= {first.name: [both], last.name: []}
        now |= zip(node.outs, both.outs[len(norm.outs) :], strict=True)
    nodes = [n for node in graph.nodes for n in instead.get(node.name, [node])]
    return graph.with_nodes(nodes).renamed(now)


def _of_the_batch(norm: Node) -> bool:
    """Whether a batch norm goes by its batch alone, and keeps no running statistics."""
    return norm.args[3:6] == (None, None, True) and norm.spec.dtype in DTYPES


def _unbiased(node: Node, norm: Node) -> bool:
    """Whether it is the unbiased variance, and the mean, over what the norm goes over."""
    dims = [d for d in range(len(norm.spec.shape)) if d != 1]
    return [*node.args[1]] == dims and node.kwargs == (("correction", 1),)
