"""Calls like earlier ones are written as they would be without that."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from merakc.frontend.calls.repeats import Repeats
from merakc.frontend.record import record
from merakc.ir.graph import Graph, typed


class Twice(nn.Module):
    """Two equal layers of a function of a weight and a tensor, the sum of which is the loss."""

    def __init__(self, layer: Callable[[Twice, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer = layer
        self.weight = nn.Parameter(torch.ones(6, 6))
        self.held: torch.Tensor
        self.register_buffer("held", torch.ones(6, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = self.layer(self, x)
        return x.sum()


def _plain(own: Twice, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ own.weight * 2 + 1) * 2.0


def _numbers(own: Twice, x: torch.Tensor) -> torch.Tensor:
    whole = torch.ones(6, dtype=torch.int64)
    return x + (whole * 1) + (whole * 1.0) + (whole * True) + (x * 0.0).copysign(x * -0.0)


def _views(own: Twice, x: torch.Tensor) -> torch.Tensor:
    one, two = torch.split(x.clone(), 3, 1)
    one.mul_(2)
    two.t()[0].add_(1)
    rows = torch.stack([one, two]).unbind(0)
    return torch.cat([rows[0].reshape(6, 3), two], 1)


def _written(own: Twice, x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    part = y.view(36)[:6]
    before = y + 1
    y.add_(part.view(6, 1))
    own.held.mul_(0.5)
    return y + before + part.view(6, 1) + own.held


def _detached(own: Twice, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        y = x * own.weight
    return x * own.weight + y.detach() + own.weight.detach() + (x * own.weight).detach()


def _same(own: Twice, x: torch.Tensor) -> torch.Tensor:
    y = x.contiguous().to(torch.float32).expand(6, 6)
    return y.transpose(0, 1).contiguous().to(torch.float64).to("cpu", torch.float32) + y


def _made(own: Twice, x: torch.Tensor) -> torch.Tensor:
    made = torch.ones(6, device=x.device) + torch.full((6,), 2.0, device=x.device)
    return x + made + torch.cat([torch.tensor([]), x[0]]) + torch.zeros_like(x)


def _default(own: Twice, x: torch.Tensor) -> torch.Tensor:
    whole = torch.ones(6, dtype=torch.int64) + 1
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        other = whole / whole + torch.ones(6)
    finally:
        torch.set_default_dtype(usual)
    return x + (whole / whole + torch.ones(6)) * other.to(x.dtype)


def _drawn(own: Twice, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.dropout(x, 0.5) + torch.rand(6) + nn.functional.dropout(x, 0.25)


def _recorded(model: nn.Module) -> Graph:
    return record(model, (torch.ones(6, 6),), {}).graph


@pytest.mark.parametrize(
    "layer",
    [_plain, _numbers, _views, _written, _detached, _same, _made, _default, _drawn],
    ids=lambda layer: layer.__name__,
)
def test_the_graph_is_that_of_calls_that_are_all_new(
    layer: Callable[[Twice, torch.Tensor], torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes, constants, and what is said of each node."""
    made = _recorded(Twice(layer))
    monkeypatch.setattr(Repeats, "run", lambda *_: NotImplemented)
    plain = _recorded(Twice(layer))
    assert str(made) == str(plain)
    assert made.nodes == plain.nodes
    assert list(made.constants) == list(plain.constants)
    assert [typed(n.args) for n in made.nodes] == [typed(n.args) for n in plain.nodes]


def test_equal_calls_take_the_short_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the first of them."""
    found, run = [], Repeats.run

    def counted(*given: object) -> object:
        out = run(*given)  # type: ignore[arg-type]
        found.append(out is not NotImplemented)
        return out

    monkeypatch.setattr(Repeats, "run", counted)
    _recorded(Twice(_plain))
    assert sum(found) >= 8


def test_the_usual_dtype_of_each_call_is_said() -> None:
    """It is changed between two layers, and back."""
    made = _recorded(Twice(_default))
    dtypes = [n.spec.dtype for n in made.nodes if n.op == "aten.div.Tensor"]
    assert dtypes == [torch.float64, torch.float32] * 3
