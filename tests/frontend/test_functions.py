"""Custom autograd functions: their own backward, however `apply` is reached."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from merakc.errors import RecordError
from merakc.frontend.functions import apply_plainly, function_calls
from merakc.frontend.record import record
from merakc.kernels.opaque import OPAQUE
from tests.frontend.against_eager import check
from tests.frontend.small import Small, linear, randn


class Signs(torch.autograd.Function):
    """A straight-through estimator: its backward is not its derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.sign()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] * ctx.factor, None


class Several(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Any:
        ctx.save_for_backward(x, y)
        return x * y, x + y, 5

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, y = ctx.saved_tensors
        return grads[0] * y * 2 + grads[1], grads[0] * x + grads[1] * 7


class NewStyle(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return grads[0] * x


class SameTensor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return -grads[0]


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        ctx.save_for_backward(x)
        order = x.argsort(-1)
        ctx.mark_non_differentiable(order)
        return x.exp(), order

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return grads[0] * x * 3


class Contained(torch.autograd.Function):
    """Autograd sees no tensor inside a container."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, more: dict[str, Any], rest: list[Tensor]) -> Tensor:
        assert isinstance(rest, list)
        ctx.more = more
        return x * more["by"][0] + rest[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] * ctx.more["by"][0] * 5, None, None


class Dirty(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] * 7


class Overridden(Signs):
    @classmethod
    def apply(cls, x: Tensor) -> Any:
        return super().apply(x * 2, 5.0)


early = Signs.apply  # bound long before anything is recorded
partly = functools.partial(Signs.apply)


def _by_default(y: Tensor, function: Callable[..., Any] = Signs.apply) -> Any:
    return function(y, 4.0)


def _contained(y: Tensor, x: Tensor) -> Tensor:
    out: Tensor = Contained.apply(y, {"by": (y, "word")}, [x]) + y
    return out


def _once(y: Tensor, x: Tensor) -> Tensor:
    out, order = Once.apply(y)
    chosen: Tensor = out.gather(-1, order)[:, :2]
    return chosen


def _dirty(y: Tensor, x: Tensor) -> Tensor:
    z = y * 3
    view = z[:2]
    out = Dirty.apply(z)
    return out.sum() * view.sum() + z.square().sum()


def _several(y: Tensor, x: Tensor) -> Tensor:
    a, b, number = Several.apply(y, x)
    out: Tensor = a * b * number
    return out


FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "own backward": lambda y, x: Signs.apply(y, 3.0) * x,
    "twice": lambda y, x: Signs.apply(Signs.apply(y, 2.0) * y, 3.0) * y,
    "several outputs": _several,
    "setup_context": lambda y, x: NewStyle.apply(y),
    "bound early": lambda y, x: early(y, 3.0) * y,
    "bound early, in a partial": lambda y, x: partly(y, 3.0) * y,
    "bound early, as a default": lambda y, x: _by_default(y) * y,
    "an apply of its own": lambda y, x: Overridden.apply(y) * y,
    "once differentiable": _once,
    "tensors in containers": _contained,
    "marked dirty": _dirty,
    "the tensor itself": lambda y, x: SameTensor.apply(y) * y,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_custom_functions_keep_their_backward(name: str) -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        out: Tensor = FUNCTIONS[name](s.layer(x), x).sum()
        return out

    check(Small(forward, layer=linear()), randn(4, 6))


def test_a_function_copies_what_it_writes_to() -> None:
    """So that its argument may be what a stage is given, and be read by others."""
    model = Small(lambda s, x: FUNCTIONS["marked dirty"](s.layer(x), x).sum(), layer=linear())
    graph = record(model, (randn(4, 6),), {}).graph
    (call,) = [n for n in graph.nodes if n.op in graph.functions]
    given = torch.ones(4, 6, dtype=torch.float64, requires_grad=True)
    out = graph.functions[call.op](given)
    assert torch.equal(out, given * 2)
    assert torch.equal(torch.autograd.grad(out.sum(), given)[0], torch.full_like(given, 7.0))


def test_functions_of_one_name_are_told_apart() -> None:
    def make(factor: float) -> Any:
        class Times(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                return x * factor

            @staticmethod
            def backward(ctx: Any, *grads: Tensor) -> Any:
                return grads[0] * factor * 3

        return Times

    double, triple = make(2.0), make(3.0)

    def forward(s: Any, x: Tensor) -> Tensor:
        y = s.layer(x)
        out: Tensor = (double.apply(y) + triple.apply(y) ** 2 + triple.apply(y)).sum()
        return out

    graph = check(Small(forward, layer=linear()), randn(4, 6)).graph
    assert len(graph.functions) == 2


class Holds(nn.Module):
    """A module that has bound its function when it was made."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.function = linear(), Signs.apply

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = (self.function(self.layer(x), 3.0) * x).sum()
        return out


def test_a_function_bound_by_a_module() -> None:
    check(Holds(), randn(4, 6))


class Reads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module) -> Tensor:
        return x * module.weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], None


def test_a_tensor_that_is_no_argument_is_refused() -> None:
    model = Small(lambda s, x: Reads.apply(s.layer(x), s.layer).sum(), layer=linear())
    with pytest.raises(RecordError, match=r"test_functions.py:\d+: custom function Reads reads a "
                       "tensor that it is not given, 'layer.weight'.*as an argument"):  # fmt: skip
        record(model, (randn(6, 6),), {})


def test_a_function_without_gradients_is_recorded_call_by_call() -> None:
    """As autograd takes it: nothing inside has a gradient, what it reads beside it neither."""

    def forward(s: Any, x: Tensor) -> Tensor:
        out: Tensor = (s.layer(x) + Reads.apply(x, s.layer)).sum()
        return out

    assert not check(Small(forward, layer=linear()), randn(6, 6)).graph.functions


def test_a_function_that_draws_is_refused() -> None:
    """Each rank would draw other numbers, and a recomputation as well."""

    class Rounds(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return (x + torch.rand_like(x)).floor()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            return grads

    model = Small(lambda s, x: Rounds.apply(s.layer(x)).sum(), layer=linear())
    with pytest.raises(RecordError, match=r"Rounds draws random numbers.*give them to apply"):
        record(model, (randn(6, 6),), {})


class Inside(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, how: str) -> Any:
        if how == "returns tensors inside a container":
            return x * 2, [x * 3]
        x.mul_(2)
        return x * 3

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], None


@pytest.mark.parametrize("how", ["returns tensors inside a container", "writes to a tensor"])
def test_what_a_node_cannot_hold_is_refused(how: str) -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        out = Inside.apply(s.layer(x) * 1, how)
        total: Tensor = (out[0] if isinstance(out, tuple) else out).sum()
        return total

    with pytest.raises(RecordError, match=how):
        record(Small(forward, layer=linear()), (randn(4, 6),), {})


def _grown_later(s: Any, x: Tensor) -> Tensor:
    rest = [x]
    out: Tensor = Contained.apply(s.layer(x), {"by": (x,)}, rest)
    rest.append(out)
    return out.sum()


def test_a_list_that_changes_behind_the_call_is_refused() -> None:
    with pytest.raises(RecordError, match=r"Contained is given a list .* changes later"):
        record(Small(_grown_later, layer=linear()), (randn(4, 6),), {})


def test_calls_are_handed_over() -> None:
    def handle(cls: Any, args: Any) -> Any:
        assert cls is Signs
        return apply_plainly(cls, *args) + 1

    x = torch.ones(1)
    with function_calls(handle):
        assert early(x, 1.0).item() == Signs.apply(x, 1.0).item() == 2
    assert early(x, 1.0).item() == 1


class Reversible(torch.autograd.Function):
    """Its backward runs a module again and gives gradients by a backward() of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module) -> Tensor:
        ctx.save_for_backward(x)
        ctx.module = module
        with torch.no_grad():
            out: Tensor = module(x)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            ctx.module(x).backward(grads[0])
        return x.grad, None


def test_a_function_around_a_module_runs_as_it_is() -> None:
    inner = Small(lambda s, x: Reversible.apply(x, s.layer), layer=linear())
    model = Small(lambda s, x: s.inner(s.layer(x)).square().sum(), layer=linear(), inner=inner)
    graph = check(model, randn(4, 6), relative=1e-12).graph
    assert [n.module for n in graph.nodes if n.op == OPAQUE] == ["inner"]
