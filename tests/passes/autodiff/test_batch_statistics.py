"""A batch norm's statistics come with what it normalises."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import merakc
from merakc.frontend.record import record
from merakc.ir.graph import Graph, Node
from merakc.ir.program import StageGraphs
from merakc.passes.autodiff.batch_statistics import BOTH, NORM, STATISTICS, with_statistics
from merakc.passes.pipeline import differentiate


class Net(nn.Module):
    """A convolution and a norm, whose output or its square is the loss."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, dtype=dtype)
        self.norm = nn.BatchNorm2d(4, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x)).relu().pow(2).sum()


def pieces(net: nn.Module, dtype: torch.dtype = torch.float64) -> StageGraphs:
    return differentiate(record(net, (torch.randn(2, 3, 6, 6, dtype=dtype),), {}).graph)


def ops(graph: Graph) -> list[str]:
    return [n.op for n in graph.nodes if n.op in (NORM, STATISTICS, BOTH)]


def test_two_calls_are_one() -> None:
    stage = pieces(Net())
    assert sorted(ops(stage.forward)) == [NORM, STATISTICS]
    made = with_statistics(stage)
    made.forward.verify()
    assert ops(made.forward) == [BOTH]
    assert made.backward is stage.backward
    assert [o.name for o in made.forward.outputs] == [o.name for o in stage.forward.outputs]


def test_the_earlier_place_is_taken() -> None:
    """Whichever of the two comes first."""
    stage = pieces(Net())
    (norm,) = (n for n in stage.forward.nodes if n.op == NORM)
    at = next(k for k, n in enumerate(stage.forward.nodes) if n.op == STATISTICS)
    nodes = [n for n in stage.forward.nodes if n is not norm]
    nodes.insert(at, norm)
    made = with_statistics(replace(stage, forward=stage.forward.with_nodes(nodes)))
    made.forward.verify()
    assert ops(made.forward) == [BOTH]


@pytest.mark.parametrize("what", ["half", "others", "dims", "made"])
def test_what_is_otherwise_stays(what: str) -> None:
    """Statistics of another dtype, of another value, over other dims; and scales that are made."""
    dtype = torch.float16 if what == "half" else torch.float64
    stage = pieces(Net(dtype), dtype)

    def changed(node: Node) -> Node:
        if node.op == STATISTICS and what == "others":
            return node.reading((stage.forward.nodes[-1].refs[0], *node.args[1:]))
        if node.op == STATISTICS and what == "dims":
            return node.reading((node.args[0], (0, 2)))
        if node.op == NORM and what == "made":
            return node.reading((node.args[0], node.args[0], *node.args[2:]))
        return node

    nodes = [changed(n) for n in stage.forward.nodes]
    graph = stage.forward.with_nodes(nodes)
    assert with_statistics(replace(stage, forward=graph)).forward is graph


def test_nets_train_and_keep_statistics_as_eager_does() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(Net(), nn.Flatten(0)).train()
    batches = [torch.randn(4, 3, 6, 6, dtype=torch.float64) for _ in range(3)]
    model = merakc.auto_parallel(copy.deepcopy(plain), batches[0], dp=1, tp=1, pp=1)
    sides = [(m, torch.optim.SGD(m.parameters(), lr=1e-3)) for m in (plain, model)]
    for batch in batches:
        for one, optimizer in sides:
            optimizer.zero_grad()
            one(batch).sum().backward()
            optimizer.step()
    wanted = plain.state_dict()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-12, atol=1e-14)
