"""Attributes that are set on the tensors of a parallel model count in its steps."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import merakc
from merakc.errors import RecordError
from merakc.frontend.python.attributes import Attributes
from merakc.machines.cluster import NOMINAL_CPU

X = torch.linspace(-1, 1, 8).view(2, 4)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c, self.plain = nn.Linear(4, 3), torch.ones(3)
        self.register_buffer("scales", torch.ones(3))
        self.c.weight.old = SimpleNamespace(factor=3.0)  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        factor = getattr(self.c.weight, "old", SimpleNamespace(factor=7.0)).factor
        for tensor in (self.c.weight, self.scales, self.plain):
            factor = factor * getattr(tensor, "factor", 1.0)
        return (self.c(x) * self.scales * self.plain).sum() * factor


def _on_parameter(model: Any) -> None:
    model.c.weight.factor = 2.0


def _on_buffer(model: Any) -> None:
    model.scales.factor = 2.0


def _on_plain(model: Any) -> None:
    model.plain.factor = 2.0


def _inside(model: Any) -> None:
    model.c.weight.old.factor = 2.0


def _deleted(model: Any) -> None:
    del model.c.weight.old


@pytest.mark.parametrize("change", [_on_parameter, _on_buffer, _on_plain, _inside, _deleted])
def test_steps_go_by_them(change: Callable[[Any], None]) -> None:
    torch.manual_seed(0)
    plain = Scaled()
    state = plain.state_dict()
    given = Scaled()
    given.load_state_dict(state)
    model = merakc.auto_parallel(given, {"x": X}, cluster=NOMINAL_CPU)
    before = model(x=X)
    assert torch.allclose(before, plain(X))
    for one in (plain, model):
        change(one)
    for _ in range(2):
        assert torch.allclose(model(x=X), plain(X))
    assert not torch.allclose(model(x=X), before)


def test_those_that_hold_tensors_are_refused() -> None:
    model: Any = merakc.auto_parallel(Scaled(), {"x": X}, cluster=NOMINAL_CPU)
    model(x=X)
    model.c.weight.gathered = torch.ones(3)
    with pytest.raises(RecordError, match=r"'c\.weight' has an attribute 'gathered' that holds"):
        model(x=X)


def test_what_either_has_by_itself_stays() -> None:
    shown, source = torch.ones(2), torch.ones(2)
    shown.ours, source.theirs = 1, 2  # type: ignore[attr-defined]
    attributes = Attributes([(shown, source)])
    shown.ours, shown.users = 3, 4  # type: ignore[attr-defined]
    attributes.pass_on()
    assert vars(source) == {"theirs": 2, "users": 4}
    shown.users = 5  # type: ignore[attr-defined]
    attributes.pass_on()
    assert vars(source) == {"theirs": 2, "users": 5}
    del shown.users  # type: ignore[attr-defined]
    attributes.pass_on()
    assert vars(source) == {"theirs": 2}
