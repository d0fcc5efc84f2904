"""Methods of parts: those that look something up run, others are refused and do nothing."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import merakc
from benchmarks.ranks import run_ranks
from merakc.errors import ConfigError
from merakc.machines.cluster import NOMINAL_CPU

WIDTH = 4


class Part(nn.Module):
    """With methods of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(WIDTH, 2 * WIDTH), 2.0

    def found(self) -> nn.Module:
        """Looks something up, by a method of its own."""
        return self.got("layer")

    def got(self, name: str) -> Any:
        """Of this name."""
        return getattr(self, name)

    def count(self) -> int:
        """Of all elements, wherever they are."""
        return sum(p.numel() for p in self.parameters())

    def applied(self, x: torch.Tensor) -> Any:
        """Of `[n, WIDTH]`, computed by a module of its own alone."""
        return self.layer(x)

    def doubled(self) -> torch.Tensor:
        """Computes."""
        return self.layer.weight * 2

    def rescale(self) -> None:
        """Changes what the forward goes by, and then computes."""
        self.scale = 3.0
        self.layer.weight.mul_(2)

    def forget(self) -> None:
        """Deletes something."""
        del self.scale

    def each(self) -> Iterator[torch.Tensor]:
        """Would compute when somebody goes through it."""
        yield self.layer.weight * 2

    async def later(self) -> torch.Tensor:
        """Would compute when somebody waits for it."""
        return self.layer.weight * 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of `[n, WIDTH]`."""
        return self.scale * self.layer(x)


class Whole(nn.Module):
    """Whose method asks the part for something."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Part()

    def found(self) -> nn.Module:
        """The layer in it."""
        return self.part.found()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A loss."""
        return self.part(x).square().mean()


BATCH = torch.linspace(-1, 1, 4 * WIDTH).double().view(4, WIDTH)
REFUSED = "doubled", "rescale", "forget", "each", "later"


def told(layout: dict[str, int]) -> tuple[list[str], torch.Tensor]:
    torch.manual_seed(0)
    model: Any = merakc.auto_parallel(Whole().double(), BATCH, cluster=NOMINAL_CPU, **layout)
    part = model.part
    assert part.found() is model.found() is part.layer
    assert part.count() == (WIDTH + 1) * 2 * WIDTH
    assert list(inspect.signature(part.got).parameters) == ["name"]
    errors = []
    for name in REFUSED:
        with pytest.raises(ConfigError) as refused:
            getattr(part, name)()
        errors.append(str(refused.value))
    assert part.scale == 2.0
    part.scale = 4.0  # as anybody may
    assert part.scale == 4.0
    return errors, model.eval().part.applied(BATCH).detach()


@pytest.mark.parametrize("layout", [{}, {"tp": 2}])
def test_methods_of_parts(layout: dict[str, int]) -> None:
    torch.manual_seed(0)
    wanted = Whole().double().part.applied(BATCH).detach()
    for errors, found in run_ranks(2, told, layout) if layout else [told(layout)]:
        for name, error in zip(REFUSED, errors, strict=True):
            changes = ", which changes 'scale'," if name in ("rescale", "forget") else ""
            assert error.startswith(f"Part.{name}{changes} is called after auto_parallel")
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
