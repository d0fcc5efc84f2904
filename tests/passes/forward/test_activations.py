"""Activations that models write out: which are told, by what they compute, and which are not."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from merakc.frontend.record import record
from merakc.ir.graph import Graph, OutputKind
from merakc.lowering.lowered import training_graph
from merakc.passes.autodiff.differentiate import joint_graph
from merakc.passes.autodiff.interpret import interpret
from merakc.passes.forward.activations import with_activations

C = math.sqrt(2 / math.pi)
TANH, ERF, SILU = "gelu tanh", "gelu", "silu"
Function = Callable[[Tensor], Tensor]
TOLD: dict[str, tuple[str, Function]] = {
    "tanh, as published": (
        TANH,
        lambda x: 0.5 * x * (1 + torch.tanh(C * (x + 0.044715 * torch.pow(x, 3)))),
    ),
    "tanh, factored": (
        TANH,
        lambda x: 0.5 * x * (1.0 + torch.tanh(x * C * (1.0 + 0.044715 * x * x))),
    ),
    "tanh, the half inside": (
        TANH,
        lambda x: x * (0.5 + 0.5 * torch.tanh((x**3 * 0.044715 + x) * C)),
    ),
    "tanh, the half last": (
        TANH,
        lambda x: (x * (torch.tanh(C * x + C * 0.044715 * x**3) + 1)) / 2,
    ),
    "tanh of a multiple": (
        TANH,
        lambda x: _by_tanh(y := 2 * x, C * (y + 0.044715 * y**3)),
    ),
    "erf": (ERF, lambda x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))),
    "erf, a cdf": (ERF, lambda x: (torch.erf(x * math.sqrt(0.5)) + 1) * 0.5 * x),
    "erf of a product": (ERF, lambda x: _gelu(x * x.flip(0))),
    "sigmoid": (SILU, lambda x: x * torch.sigmoid(x)),
    "sigmoid, gated": (SILU, lambda x: x.flip(0) * (x.sigmoid() * x)),
}


def _gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def _by_tanh(x: Tensor, inner: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(inner))


def _half_without_gradient(x: Tensor) -> Tensor:
    with torch.no_grad():
        cdf = 0.5 * (1 + torch.erf(x / math.sqrt(2)))
    return x * cdf


def _product_without_gradient(x: Tensor) -> Tensor:
    cdf = 1 + torch.erf(x / math.sqrt(2))
    with torch.no_grad():
        product = x * cdf
    return 0.5 * product + cdf


def _of_whole_numbers(x: Tensor) -> Tensor:
    signs = x.sign().long()
    return x + signs * torch.sigmoid(signs)


LEFT: dict[str, Function] = {
    "another constant": lambda x: _by_tanh(x, C * (x + 0.0447 * x**3)),
    "a constant of eight digits": lambda x: _by_tanh(x, 0.79788456 * (x + 0.044715 * x**3)),
    "another power": lambda x: _by_tanh(x, C * (x + 0.044715 * x**2)),
    "minus": lambda x: 0.5 * x * (1 - torch.erf(x / math.sqrt(2))),
    "no half": lambda x: x * (1 + torch.erf(x / math.sqrt(2))),
    "another argument": lambda x: 0.5 * x * (1 + torch.erf(x.flip(0) / math.sqrt(2))),
    "a sum inside": lambda x: 0.5 * x * (1 + torch.erf((x + 1) / math.sqrt(2))),
    "quick GELU": lambda x: x * torch.sigmoid(1.702 * x),
    "sigmoid of another": lambda x: x * torch.sigmoid(x.flip(0)),
    "a part without gradient": _half_without_gradient,
    "a product without gradient": _product_without_gradient,
    "whole numbers": _of_whole_numbers,
    "in another precision": lambda x: x * torch.sigmoid(x.float()),
    "a broadcast": lambda x: x[:1] * torch.sigmoid(x),
}  # fmt: skip


class Model(nn.Module):
    """A function of a product, in a loss."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 7, dtype=torch.float64))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        """A loss."""
        return (self.function(x @ self.weight) ** 2).sum()


def named(graph: Graph) -> list[str]:
    """torch's activations in a graph."""
    found = [n for n in graph.nodes if n.op.split(".")[1] in ("gelu", "silu")]
    return [" ".join([n.op.split(".")[1], *(str(v) for _, v in n.kwargs)]) for n in found]


@pytest.mark.parametrize("name", [*TOLD, *LEFT])
def test_activations_are_told_by_what_they_compute(name: str) -> None:
    """Each form becomes one call, or stays as it is; values and gradients are the model's."""
    torch.manual_seed(0)
    wanted, function = TOLD[name] if name in TOLD else ("", LEFT[name])
    model, x = Model(function), torch.randn(4, 5, dtype=torch.float64)
    graph = with_activations(record(model, (x,), {}).graph)
    assert named(graph) == ([wanted] if wanted else [])
    loss = model(x)
    loss.backward()
    joint = joint_graph(training_graph(graph))
    given = {"0": x, "weight": model.weight.detach()}
    given |= {i.name: torch.ones((), dtype=x.dtype) for i in joint.inputs if i.name not in given}
    found = {o.kind: v for o, v in zip(joint.outputs, interpret(joint, given), strict=True)}
    torch.testing.assert_close(found[OutputKind.LOSS], loss, rtol=1e-13, atol=0)
    torch.testing.assert_close(found[OutputKind.GRADIENT], model.weight.grad, rtol=1e-12, atol=0)


def test_constants_differ_by_less_than_rounding() -> None:
    """Eight digits are enough for float32, and not for float64."""
    model, x = Model(LEFT["a constant of eight digits"]), torch.randn(4, 5)
    assert named(with_activations(record(model, (x.double(),), {}).graph)) == []
    assert named(with_activations(record(model.float(), (x,), {}).graph)) == [TANH]


def test_what_else_reads_a_part_still_has_it() -> None:
    """The gate is an output of its own."""

    def both(x: Tensor) -> Tensor:
        gate = torch.sigmoid(x)
        return x * gate + gate

    graph = with_activations(record(Model(both), (torch.randn(4, 5).double(),), {}).graph)
    assert named(graph) == [SILU]
    assert any(n.op == "aten.sigmoid.default" for n in graph.nodes)
