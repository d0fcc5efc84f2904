"""Modules that run as they are: whether each sample is by itself is seen with numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function

from merakc.frontend.record import record
from merakc.ir.batches import Rows
from merakc.ir.graph import Graph, Ref
from merakc.kernels.opaque import OPAQUE
from merakc.passes.batches import apart
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


def thought_over(x: Tensor) -> Tensor:
    """Again, until the mean of all samples is small: after one time for all that are tried."""
    for _ in range(3):
        x = x.tanh()
        if x.abs().mean() < 10.0:
            return x
    return x * 2


class Centring(Function):
    """Of its samples apart but in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad - grad.mean(0)


class Failing(Function):
    """Of gradients that it is not made for."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise ValueError("no")


class Scaling(Function):
    """By a number that each call is given, and a bound on gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return (grad * ctx.factor).clamp(-1.0, 1.0), None


class Unread(Function):
    """Adds one to the gradient of a parameter wherever its own result has none."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        return x * 1, x * scale

    @staticmethod
    def backward(ctx: Any, first: Tensor | None, second: Tensor | None) -> Any:
        if second is None:
            return first, torch.ones(4)
        return (second if first is None else first + second), second.sum(0)


class Reversing(Function):
    """Turns gradients around."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return -grad


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x - x.mean(0),
        lambda x: x.flip(0),
        lambda x: x - 1e-3 * x.mean(0),
        lambda x: x * 0.999 ** len(x),
        thought_over,
        lambda x: x / x.abs().max() if x.abs().max() > 1e4 else x,
        lambda x: x * 2 if x.abs().max().item() > 1e4 else x,
        lambda x: x - x.mean(0) if x[0, 0] > 1e4 else x,
        lambda x: x if x.softmax(1).amax(1).min() > 0.999 else x.sin(),
        Centring.apply,
    ],
)
def test_samples_together(function: object) -> None:
    _, state = found_of(Branching(function))
    assert state.kind is Kind.COUPLED
    assert "'inner' computes over several samples" in state.why


def test_numbers_of_each_sample_may_be_asked_for() -> None:
    _, state = found_of(Branching(lambda x: torch.stack([r if r.sum() > 0 else -r for r in x])))
    assert state.kind is Kind.ROWS


class Limiting(Function):
    """By a bound on the norm of all that no value that is tried reaches."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ids: Tensor) -> Tensor:
        most = 1e3 + (ids == 5).sum() if ids.numel() else 1e3
        return x * (most / x.norm()).clamp(max=1.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


@pytest.mark.parametrize(
    ("forward", "kind"),
    [
        (lambda m, x: Scaling.apply(m.first(x), 2.0), Kind.ROWS),
        (lambda m, x: Scaling.apply(m.first(x), float(len(x))), Kind.COUPLED),
        (lambda m, x: Centring.apply(m.first(x)), Kind.COUPLED),
        (lambda m, x: Failing.apply(m.first(x)), Kind.COUPLED),
        (lambda m, x: m.first(x) * Scaling.apply(m.scale, 2.0), Kind.COUPLED),
        (lambda m, x: m.first(x) * Reversing.apply(m.scale), Kind.ROWS),
        (lambda m, x: Unread.apply(m.first(x), m.scale)[0], Kind.COUPLED),
        (lambda m, x: Limiting.apply(m.first(x), torch.ones(0)), Kind.COUPLED),
    ],
    ids=[
        "scaled",
        "by size",
        "centred",
        "failing",
        "bound on a parameter",
        "of a parameter",
        "of no gradient",
        "bound on the norm",
    ],
)
def test_custom_functions_are_tried(forward: Any, kind: Kind) -> None:
    class Custom(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.scale = nn.Linear(4, 4), nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return forward(self, x).square().mean()  # type: ignore[no-any-return]

    graphs = [record(Custom(), (torch.zeros(n, 4),), {}).graph for n in (3, 8)]
    found = analyse(*graphs, {"0": Rows()}, 3, 8)
    (node,) = [n for n in found.part.nodes if n.op == "aten.pow.Tensor_Scalar"]
    assert found.states[node.refs[0]].kind is kind


def test_whole_numbers_of_small_parts() -> None:
    """Parts that hold all labels number them as the whole batch does, and others do not."""

    class Numbered(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return (x * torch.unique(y, return_inverse=True)[1]).mean()

    def recorded(n: int) -> Graph:
        return record(Numbered(), (torch.zeros(n), torch.arange(n) % 2), {}).graph

    found = analyse(recorded(5), recorded(10), {"0": Rows(), "1": Rows()}, 5, 10)
    (node,) = [n for n in found.part.nodes if n.op == OPAQUE]
    assert found.states[Ref(node.name)].whole


def test_what_draws_is_not_taken_for_it() -> None:
    _, state = found_of(Branching(torch.nn.functional.dropout))
    assert state.kind is Kind.COUPLED
    assert "'inner' draws random numbers, which parts would draw otherwise" in state.why


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (lambda x: x.softmax(1), Kind.ROWS),
        (lambda x: x - x.mean(1, keepdim=True), Kind.ROWS),
        (lambda x: x - x.mean((0, 1)), Kind.COUPLED),
        (lambda x: x.flip(0), Kind.COUPLED),
    ],
)
def test_large_modules_are_tried_on_short_sequences(
    function: Any, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(apart, "MOST_FLOPS", 0)
    model = Model(Branching(function))
    graphs = [record(model, (torch.zeros(n, 50, 4),), {}).graph for n in (2, 6)]
    found = analyse(*graphs, {"0": Rows()}, 2, 6)
    (node,) = [n for n in found.part.nodes if n.op == OPAQUE]
    assert found.states[Ref(node.name)].kind is kind


def test_what_is_too_large_is_not_taken_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apart, "MOST_FLOPS", 0)
    _, state = found_of(Branching(lambda x: x.softmax(1)))  # no size but that of its parameters
    assert state.kind is Kind.COUPLED
    assert "is too large to be tried" in state.why


@pytest.mark.parametrize(("function", "kind"), [(Scaling, Kind.ROWS), (Centring, Kind.COUPLED)])
def test_large_functions_are_tried_on_smaller_matrices(
    function: Any, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(apart, "MOST_ELEMENTS", 1000)
    more = (2.0,) if function is Scaling else ()

    class Custom(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1024))

        def forward(self, x: Tensor) -> Tensor:
            return function.apply(x * self.scale, *more).square().mean()  # type: ignore[no-any-return]

    graphs = [record(Custom(), (torch.zeros(n, 1024),), {}).graph for n in (3, 8)]
    found = analyse(*graphs, {"0": Rows()}, 3, 8)
    (node,) = [n for n in found.part.nodes if n.op == "aten.pow.Tensor_Scalar"]
    assert found.states[node.refs[0]].kind is kind


def test_a_batch_norm_is_named() -> None:
    found, state = found_of(Branching(lambda x: x.tanh(), norm=True))
    assert state.kind is Kind.ROWS
    assert "batch norm in 'inner' is over each micro-batch" in found.assumed[0]


@pytest.mark.parametrize("on", [0, 1])
@pytest.mark.parametrize("function", [lambda x: x - x.mean(0), lambda x: x.tanh()])
def test_what_a_buffer_switches_on_counts(function: Any, on: int) -> None:
    """The numbers at random that it has in a trial may be those of any way."""

    class Switched(Branching):
        def __init__(self) -> None:
            super().__init__(lambda x: function(x) if self.on[0] == on else x)
            self.register_buffer("on", torch.tensor([on], dtype=torch.uint8))

    _, state = found_of(Switched())
    assert state.kind is (Kind.COUPLED if "mean" in function.__code__.co_names else Kind.ROWS)


def test_a_buffer_that_is_left_as_it_is_couples_nothing() -> None:
    class Buffered(Branching):
        def __init__(self) -> None:
            super().__init__(lambda x: x * self.table)
            self.register_buffer("table", torch.arange(4.0))

    _, state = found_of(Buffered())
    assert state.kind is Kind.ROWS
