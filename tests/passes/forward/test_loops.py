"""Loops over pieces of a tensor as calls on all of them: the same numbers, and fewer calls."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from merakc.frontend.record import record
from merakc.ir.graph import Graph, InputKind
from merakc.passes.autodiff.interpret import interpret
from merakc.passes.forward.loops import rolled

EQUAL, UNLIKE = (3, 3, 3, 3), (5, 1, 2, 4)
Forward = Callable[["Loop", Tensor, tuple[int, ...]], Tensor]


class Loop(nn.Module):
    """A forward of `x` [12, 4] that goes through pieces."""

    def __init__(self, forward: Forward, sizes: tuple[int, ...]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)
        self.run, self.sizes = forward, sizes
        self.double()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """The sum of squares."""
        y = self.run(self, self.layer(x), self.sizes)
        return {"loss": (y * torch.arange(float(y.numel())).reshape(y.shape)).square().sum()}


def attention(m: Loop, y: Tensor, sizes: tuple[int, ...]) -> Tensor:
    heads = y.view(12, 2, 2).transpose(0, 1).unsqueeze(0)
    each = zip(*[t.split(list(sizes), dim=2) for t in (heads, heads * 2, heads + 1)], strict=True)
    found = [F.scaled_dot_product_attention(*qkv).transpose(1, 2).contiguous() for qkv in each]
    return torch.cat(found, dim=1).reshape(12, -1)


def eager_attention(m: Loop, y: Tensor, sizes: tuple[int, ...]) -> Tensor:
    found = [(torch.softmax(p @ p.transpose(-1, -2) / 2, -1) @ p) * 3 for p in y.split(sizes)]
    return torch.cat(found)


def normed_over_piece(m: Loop, y: Tensor, sizes: tuple[int, ...]) -> Tensor:
    pieces = y.t().split(sizes, -1)
    return torch.cat([torch.softmax(p, 1).unsqueeze(0)[:, 1:3] for p in pieces], 2)


def rows(m: Loop, y: Tensor, sizes: tuple[int, ...]) -> Tensor:
    images = y.view(12, 2, 2)
    return torch.cat([m.norm(torch.tanh(p).reshape(-1, 4)) + 1 for p in images.split(sizes)])


def words(m: Loop, y: Tensor, sizes: tuple[int, ...]) -> Tensor:
    return torch.cat([p.reshape(-1, 2) for p in y.view(12, 2, 2).split(sizes)])


ROLLED: dict[str, tuple[Forward, tuple[int, ...], str]] = {
    "attention within each": (attention, EQUAL, "attention"),
    "attention by its definition": (eager_attention, EQUAL, "softmax"),
    "a dim of the piece": (normed_over_piece, EQUAL, "softmax"),
    "rows of pieces of any size": (rows, UNLIKE, "layer_norm"),
    "rows in rows": (words, UNLIKE, "cat"),
    "one piece": (attention, (12,), "attention"),
}
KEPT: dict[str, tuple[Forward, tuple[int, ...], str]] = {
    "pieces of unlike sizes that are one each": (attention, UNLIKE, "attention"),
    "another order": (
        lambda m, y, s: torch.cat([p.tanh() for p in reversed(y.split(s))]), EQUAL, "tanh"),
    "one left out": (lambda m, y, s: torch.cat([p.tanh() for p in y.split(s)[1:]]), EQUAL, "tanh"),
    "numbers of their own": (
        lambda m, y, s: torch.cat([p * k for k, p in enumerate(y.split(s))]), EQUAL, "mul"),
    "one behind the other": (
        lambda m, y, s: torch.cat([p + y.split(s)[0] for p in y.split(s)]), EQUAL, ""),
    "a sum over rows": (
        lambda m, y, s: torch.cat([p.cumsum(0).tanh() for p in y.split(s)]), UNLIKE, "tanh"),
    "one is another's": (
        lambda m, y, s: torch.cat([y.split(s)[k].tanh() for k in (0, 1, 1, 3)]), EQUAL, "tanh"),
}  # fmt: skip


def graphs(forward: Forward, sizes: tuple[int, ...]) -> tuple[Graph, Graph, float, float]:
    """The graph before and after, and what each gives of random numbers."""
    model = Loop(forward, sizes)
    x = torch.randn(12, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    before = record(model, (x,), {}).graph
    after = rolled(before)
    after.verify()
    state = dict(model.named_parameters())
    found = []
    for graph in (before, after):
        given = {i.name: x if i.kind is InputKind.BATCH else state[i.target]
                 for i in graph.inputs if i.kind is not InputKind.CONSTANT}  # fmt: skip
        found.append(float(interpret(graph, given)[0].detach()))
    wanted = float(model(x)["loss"].detach())
    assert found[0] == pytest.approx(wanted, rel=1e-12)
    return before, after, found[1], wanted


def count(graph: Graph, name: str) -> int:
    return sum(n.op.split(".")[1] == name for n in graph.nodes)


@pytest.mark.parametrize("case", ROLLED)
def test_a_loop_is_one_call_on_all_pieces(case: str) -> None:
    forward, sizes, op = ROLLED[case]
    _, after, found, wanted = graphs(forward, sizes)
    assert found == pytest.approx(wanted, rel=1e-12)
    assert count(after, op) == (op != "cat")
    assert not any("split" in n.op for n in after.nodes)


@pytest.mark.parametrize("case", KEPT)
def test_what_is_no_such_loop_stays(case: str) -> None:
    forward, sizes, op = KEPT[case]
    before, after, found, wanted = graphs(forward, sizes)
    assert found == pytest.approx(wanted, rel=1e-12)
    assert not op or count(after, op) == count(before, op) > 1
