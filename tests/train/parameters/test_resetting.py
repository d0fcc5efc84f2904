"""`module.apply(reset)` initialises a parallel model as it does a plain one, on every plan."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import merakc
from merakc.equality.ranks import run_ranks
from merakc.errors import ConfigError
from merakc.machines.cluster import NOMINAL_CPU
from tests.train.parameters.test_idioms import LAYOUTS, Net


class Unset(nn.Linear):
    """Initialises itself again by what it has."""

    is_new = True

    def reset_parameters(self) -> None:
        """Halves its weight."""
        if self.is_new:
            super().reset_parameters()
        self.weight.data /= 1 if self.is_new else 2
        self.is_new = False


class Own(nn.Linear):
    """Writes past autograd."""

    def reset_parameters(self) -> None:
        """Sets the weight alone."""
        self.weight.data.normal_(0.5)


class Normed(Net):
    """With statistics, and a module of such."""

    def __init__(self) -> None:
        super().__init__()
        self.stats, self.unset = nn.BatchNorm1d(8).double(), Unset(8, 8).double()
        self.own = Own(8, 8).double()
        nn.init.ones_(self.own.bias)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """A loss."""
        return super().forward(self.own(self.unset(self.stats(x))))


def reset(module: nn.Module) -> None:
    if hasattr(module, "reset_parameters") and not isinstance(module, Unset):
        module.reset_parameters()


def on_ranks(layout: dict[str, Any]) -> tuple[dict[str, torch.Tensor], float, str]:
    batch = torch.randn(8 // layout.get("dp", 1), 8).double()
    model = merakc.auto_parallel(Normed(), batch, micro_batches=2, cluster=NOMINAL_CPU, **layout)
    model(batch)["loss"].backward()  # the statistics have moved
    torch.manual_seed(5 if model.rank == 0 else 6)
    model.apply(reset)
    drawn = torch.rand(1).item()
    with pytest.raises(ConfigError, match=r"Unset\.reset_parameters .* makes 'weight' of values"):
        model.unset.reset_parameters()
    return model.full_state_dict(), drawn, str(model.rank)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_reset_parameters(layout: dict[str, Any]) -> None:
    plain = Normed()
    torch.manual_seed(5)
    plain.apply(reset)
    wanted, drawn = plain.state_dict(), torch.rand(1).item()
    torch.manual_seed(6)
    others = torch.rand(1).item()
    (found, own, _), (_, other, _) = run_ranks(2, partial(on_ranks, layout))
    assert (own, other) == (drawn, others)  # a rank's own random numbers stay its own
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name
