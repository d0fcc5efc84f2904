"""Of which values a rank leaves its part of the gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from merakc.frontend.record import record
from merakc.ir.graph import Ref
from merakc.passes.sharding.layouts import SequenceSplit
from merakc.passes.sharding.sequences.gradient_sums import gradient_sums


class Halves(torch.autograd.Function):
    """Of which the backward is no sum of what it makes of parts."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x / 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad.clamp(-1, 1)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.plain, self.squashed, self.halved = (nn.Linear(4, 4) for _ in range(3))
        self.halved.bias = self.squashed.bias = None
        self.fixed = nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.plain(x)
        x = F.linear(x, self.squashed.weight.tanh() * self.fixed)
        x = F.linear(x, Halves.apply(self.halved.weight))
        return (x * self.fixed).square().mean()


def test_what_is_computed_of_parameters_alone() -> None:
    graph = record(Model(), (torch.ones(2, 3, 4),), {}).graph
    ops = {n.name: n.op for n in graph.nodes}
    names = {i.name: i.target for i in graph.inputs}

    def told(sequences: tuple[SequenceSplit, ...]) -> list[str]:
        found = (ref.node for ref in gradient_sums(graph, sequences))
        return sorted(names.get(name) or ops[name] for name in found)

    parameters = ["halved.weight", "plain.bias", "plain.weight", "squashed.weight"]
    inside = frozenset(n for n, op in ops.items() if op in ("aten.linear.default",))
    split = SequenceSplit(inside, frozenset(), {})
    assert told((split,)) == sorted([*parameters, "aten.tanh.default", "aten.mul.Tensor"])
    (apart,) = (Ref(name) for name, target in names.items() if target == "squashed.weight")
    rest = (ref.node for ref in gradient_sums(graph, (split,), {apart}))
    assert sorted(names[name] for name in rest) == [n for n in parameters if "squash" not in n]
    # Where all is computed whole, all but what the user's function makes, and what reads that.
    assert told(()).count("aten.linear.default") == 2
