"""What users change between steps is seen, wherever a forward can see it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import merakc
from merakc.machines.cluster import NOMINAL_CPU
from merakc.train.settings import Settings

WEIGHTS = [1.0]
Change = Callable[[Any], Any]


def scaled(factor: float) -> Callable[[Tensor], Tensor]:
    return lambda z: z * factor


class Free(nn.Module):
    """A loss with factors in many places."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.table: dict[str, Any] = {"a": {"w": 1.0}}
        self.list, self.array, self._own = [1.0], np.ones(1), 1.0
        self.inner = SimpleNamespace(inner=SimpleNamespace(w=1.0))
        self.constant = torch.ones((), dtype=torch.float64)
        self.act: Any = nn.functional.gelu
        self.more: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        """A loss."""
        z = self.act(self.layer(x)) * self.table["a"]["w"] * self.list[0] * float(self.array[0])
        z = z * self._own * self.inner.inner.w * self.constant * WEIGHTS[0]
        for f in self.more:
            z = f(z)
        return z.square().mean() * getattr(self, "late", 1.0)


CHANGES: dict[str, Change] = {
    "a mapping in a mapping": lambda m: m.table["a"].update(w=2.0),
    "a list": lambda m: m.list.__setitem__(0, 2.0),
    "an array": lambda m: m.array.fill(2.0),
    "an underscore": lambda m: setattr(m, "_own", 2.0),
    "an object in an object": lambda m: setattr(m.inner.inner, "w", 2.0),
    "a tensor, replaced": lambda m: setattr(m, "constant", m.constant * 2),
    "a tensor, written to": lambda m: m.constant.mul_(2),
    "a function": lambda m: setattr(m, "act", scaled(2)),
    "one more": lambda m: m.more.append(scaled(2)),
    "a new attribute": lambda m: setattr(m, "late", 2.0),
    "a global": lambda _: WEIGHTS.__setitem__(0, 2.0),
    "a hook": lambda m: m.layer.register_forward_hook(lambda _m, _a, out: out * 2),
}


@pytest.mark.filterwarnings("ignore:merakc has compiled this model for 8")
def test_each_change_is_computed_with() -> None:
    """One after the other, in one model."""
    x = torch.linspace(-1, 1, 32).double().view(8, 4)
    torch.manual_seed(0)
    plain = Free().double()
    source = copy.deepcopy(plain)
    model = merakc.auto_parallel(source, x, micro_batches=4, cluster=NOMINAL_CPU)
    try:
        for name, change in CHANGES.items():
            change(plain)
            if name != "a global":
                change(source)
            assert model(x).item() == pytest.approx(plain(x).item(), rel=1e-12), name
        compiled = len(model._own("_steps").compiled)
        model(x)
        assert len(model._own("_steps").compiled) == compiled == len(CHANGES) + 1
    finally:
        WEIGHTS[0] = 1.0


@pytest.mark.parametrize("name", CHANGES)
def test_what_was_comes_back(name: str) -> None:
    """Equal settings have equal keys, and what steps do themselves is none of the user's."""
    model = Free()
    settings = Settings(model)
    assert settings.changed() == ()
    try:
        CHANGES[name](model)
        key = settings.changed()
        assert key
        assert settings.changed() is settings.seen is key
        model.table["a"]["v"] = 3
        assert settings.changed() not in ((), key)
        del model.table["a"]["v"]
        assert settings.changed() == key
        settings.settle()
        model.late = 5.0
        settings.settle()
        assert settings.changed() == key
    finally:
        WEIGHTS[0] = 1.0


def test_modes_are_told_apart_by_themselves() -> None:
    model = Free()
    settings = Settings(model)
    model.eval()
    assert settings.changed() == ()
    assert settings.modes() == (False, False)
