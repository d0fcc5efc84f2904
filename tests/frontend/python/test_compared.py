from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn

from merakc.errors import RecordError
from merakc.frontend import record as recording
from merakc.frontend.python.compared import MOST, Compared
from merakc.frontend.record import record


class Layers(nn.Module):
    """With sizes, products of them and one less in its graph."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def scale(self, length: int) -> float:
        """What its values are multiplied by."""
        return 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of `[n, s, 6]`."""
        n, s, width = x.shape
        y = self.first(x).view(n * s, width).relu().view(n, s, width)
        weights = torch.arange(n * s * s).view(n, s, s) / (n * s * s)
        y = weights @ self.second(y) * self.scale(s)
        return (y[:, 1:] - y[:, :-1]).expand(n, s - 1, width).mean()


class Clock(Layers):
    """Multiplies long ones by what a clock says, on the line of the others."""

    def scale(self, length: int) -> float:
        """Of the clock."""
        return time.time() if length > 8 else 0.5


class WholeClock(Layers):
    """Long ones by a whole number of it."""

    def scale(self, length: int) -> float:
        """Of the clock."""
        return time.time_ns() if length > 8 else 5


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The forwards that are run from here on."""
    found: list[int] = []
    run = recording._run

    def counted(*args: Any) -> Any:
        found.append(1)
        return run(*args)

    monkeypatch.setattr(recording, "_run", counted)
    return found


def of(samples: int, length: int) -> tuple[torch.Tensor]:
    """A batch of zeros."""
    return (torch.zeros(samples, length, 6),)


def test_forwards_of_other_sizes_are_explained_by_one(forwards: list[int]) -> None:
    compared, model = Compared(), Layers()
    record(model, of(3, 5), {}, compared=compared)
    assert len(forwards) == 2
    for samples, length in ((4, 5), (3, 9), (7, 31), (2, 3)):
        record(model, of(samples, length), {}, compared=compared)
    assert len(forwards) == 6


def test_another_path_of_python_is_compared_with_a_second_forward(forwards: list[int]) -> None:
    class Longer(Layers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.shape[1] > 8:
                x = x * 2
            return super().forward(x)

    compared, model = Compared(), Longer()
    for length in (5, 9, 10):
        record(model, of(3, length), {}, compared=compared)
    assert len(forwards) == 5


@pytest.mark.parametrize("kind", [Clock, WholeClock])
def test_numbers_from_outside_are_not_explained(kind: type[Layers]) -> None:
    compared, model = Compared(), kind()
    record(model, of(3, 5), {}, compared=compared)
    with pytest.raises(RecordError, match="computes something else here than the first"):
        record(model, of(3, 9), {}, compared=compared)


def test_no_more_forwards_are_kept_than_it_takes() -> None:
    compared = Compared()
    graph = record(Layers(), of(3, 5), {}).graph
    for _ in range(MOST + 3):
        compared.add(graph)
    assert len(compared.known) == MOST
    assert compared.explain(graph)
