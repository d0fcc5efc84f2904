"""Modules that run as they are: whether each sample is by itself is seen with numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from merakc.frontend.record import record
from merakc.ir.batches import Rows
from merakc.ir.graph import Graph, Ref
from merakc.kernels.opaque import OPAQUE
from merakc.passes.batches.analyse import Analysis, analyse
from merakc.passes.batches.states import Kind, State


class Branching(nn.Module):
    """Takes a way that depends on its parameters, so that no graph can hold it."""

    def __init__(self, function: object, norm: bool = False) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(4, 4), function
        self.norm = nn.BatchNorm1d(4, track_running_stats=False) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.layer(x))
        if self.layer.weight.sum() > 1e9:
            return x
        return self.function(x)  # type: ignore[operator,no-any-return]


class Model(nn.Module):
    def __init__(self, inner: Branching) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(4, 4), inner

    def forward(self, x: Tensor) -> Tensor:
        """A mean square."""
        return self.inner(self.first(x)).square().mean()


def found_of(inner: Branching) -> tuple[Analysis, State]:
    model = Model(inner)

    def recorded(samples: int) -> Graph:
        return record(model, (torch.zeros(samples, 4),), {}).graph

    found = analyse(recorded(2), recorded(6), {"0": Rows()}, 2, 6)
    (node,) = [n for n in found.part.nodes if n.op == OPAQUE]
    return found, found.states[Ref(node.name)]


def test_samples_by_themselves() -> None:
    found, state = found_of(Branching(lambda x: x.softmax(1)))
    assert state.kind is Kind.ROWS
    (told,) = found.assumed
    assert "'inner' is seen to compute each sample by itself" in told


@pytest.mark.parametrize("function", [lambda x: x - x.mean(0), lambda x: x.flip(0)])
def test_samples_together(function: object) -> None:
    _, state = found_of(Branching(function))
    assert state.kind is Kind.COUPLED
    assert "'inner' computes over several samples" in state.why


def test_what_draws_is_taken_for_it() -> None:
    found, state = found_of(Branching(lambda x: torch.nn.functional.dropout(x)))
    assert state.kind is Kind.ROWS
    assert "is taken to compute" in found.assumed[0]


def test_a_batch_norm_is_named() -> None:
    found, state = found_of(Branching(lambda x: x.tanh(), norm=True))
    assert state.kind is Kind.ROWS
    assert "batch norm in 'inner' is over each micro-batch" in found.assumed[0]


def test_a_buffer_that_is_left_as_it_is_couples_nothing() -> None:
    class Buffered(Branching):
        def __init__(self) -> None:
            super().__init__(lambda x: x * self.table)
            self.register_buffer("table", torch.arange(4.0))

    _, state = found_of(Buffered())
    assert state.kind is Kind.ROWS
