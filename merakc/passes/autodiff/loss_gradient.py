"""The gradient of a cross-entropy without a matrix of zeros.

Autograd makes the gradient of the labels' log-probabilities, zeros but for one number a row, and
then that of the logits from it. Its p - 1 at the label and p elsewhere, times the row's weight,
comes from the log-probabilities at once: as large a matrix less in memory, where a step often has
its highest point, and one less to write and read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

import torch

from merakc.ir.graph import Graph, Node, Ref, TensorSpec
from merakc.ir.program import StageGraphs

NLL: Final = "aten.nll_loss_backward.default"
SOFTMAX: Final = "aten._log_softmax_backward_data.default"
MEAN: Final = 1  # torch's number of that reduction


def without_zeros(stage: StageGraphs) -> StageGraphs:
    """The stage with a backward that computes the same so; to be asked of it before it is split."""
    if stage.backward is None:
        return stage
    return replace(stage, backward=_rewritten(stage.backward))


def _rewritten(graph: Graph) -> Graph:
    specs = graph.specs()
    made = {Ref(n.name): n for n in graph.nodes if n.op == NLL}
    nodes: list[Node] = []
    for node in graph.nodes:
        before = made.get(node.args[0]) if node.op == SOFTMAX else None
        if before is not None and _is_known(before, node, specs):
            nodes += _direct(before, node, specs)
        else:
            nodes.append(node)
    return graph.with_nodes(nodes).pruned()


def _is_known(loss: Node, softmax: Node, specs: Mapping[Ref, TensorSpec]) -> bool:
    """Whether classes weigh alike, and both are of the same [rows, classes]."""
    of, weights = loss.args[1], loss.args[3]
    spec = softmax.spec
    return (
        weights is None
        and len(spec.shape) == 2
        and softmax.args[1] == of
        and softmax.args[2] % 2 == 1
        and specs[of].dtype == spec.dtype
    )


def _direct(loss: Node, softmax: Node, specs: Mapping[Ref, TensorSpec]) -> Iterator[Node]:
    """The nodes in the place of `softmax`; the last one has its name."""
    gradient, logs, labels, _, reduction, ignored, total = loss.args
    whole, row = softmax.spec, specs[labels]
    weights = TensorSpec(row.shape, whole.dtype)
    column, columns = (TensorSpec((*row.shape, 1), s.dtype) for s in (weights, row))

    def of(part: str) -> Ref:
        return Ref(f"{softmax.name}.{part}")

    def node(name: str, op: str, *args: Any, spec: TensorSpec) -> Node:
        return Node(
            name, f"aten.{op}", args, (), (spec,), module=softmax.module, source=softmax.source
        )

    def part(name: str, op: str, *args: Any, spec: TensorSpec) -> Node:
        return node(of(name).node, op, *args, spec=spec)

    if reduction == MEAN:
        yield part("mean", "div.Tensor", gradient, total, spec=specs[gradient])
        gradient = of("mean")
    yield part("kept", "ne.Scalar", labels, ignored, spec=TensorSpec(row.shape, torch.bool))
    yield part("weights", "where.ScalarOther", of("kept"), gradient, 0.0, spec=weights)
    yield part("labels", "where.ScalarOther", of("kept"), labels, 0, spec=row)
    yield part("weight", "unsqueeze.default", of("weights"), 1, spec=column)
    yield part("label", "unsqueeze.default", of("labels"), 1, spec=columns)
    yield part("less", "neg.default", of("weight"), spec=column)
    yield part("exp", "exp.default", logs, spec=whole)
    yield part("scaled", "mul.Tensor", of("exp"), of("weight"), spec=whole)
    scaled, label, less = of("scaled"), of("label"), of("less")
    yield node(softmax.name, "scatter_add.default", scaled, 1, label, less, spec=whole)
