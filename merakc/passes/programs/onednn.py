"""Products of matrices that oneDNN computes in the place of torch's own, on a CPU.

The last pass of a stage: no other needs to know its ops. See `merakc.kernels.gemm` for why.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace

import torch

from merakc.costs.work.flops import node_flops
from merakc.ir.graph import Graph, Node, Ref, TensorSpec
from merakc.ir.program import StageGraphs
from merakc.kernels.gemm import LEAST_FLOPS, OPS
from merakc.kernels.scores import ONEDNN_PLACES, PLACES


def by_onednn(stage: StageGraphs) -> StageGraphs:
    """The stage with all its larger products of float32 matrices computed by oneDNN."""
    graphs = {f.name: getattr(stage, f.name) for f in fields(stage)}
    return replace(stage, **{name: g and _rewritten(g) for name, g in graphs.items()})


def _rewritten(graph: Graph) -> Graph:
    specs = graph.specs()
    nodes = (replace(n, op=OPS[n.op]) if _gains(n, specs) else n for n in graph.nodes)
    return graph.with_nodes([_scores(n, specs) if n.op in PLACES else n for n in nodes])


def _scores(node: Node, specs: Mapping[Ref, TensorSpec]) -> Node:
    """The call that computes scores in blocks: it is told."""
    if specs[node.args[PLACES[node.op]]].dtype != torch.float32:
        return node
    at = ONEDNN_PLACES[node.op]
    return replace(node, args=(*node.args[:at], True, *node.args[at + 1 :]))


def _gains(node: Node, specs: Mapping[Ref, TensorSpec]) -> bool:
    if node.op not in OPS or node.kwargs:
        return False
    read = [specs[ref] for ref in node.refs]
    if node.op == "aten.addmm.default" and len(read[0].shape) != 1:
        return False
    floats = all(spec.dtype == torch.float32 for spec in read)
    return floats and node_flops(node, specs) >= LEAST_FLOPS
