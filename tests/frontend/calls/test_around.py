"""Modes, hooks on what is saved, switches: refused where a compiled step would not have them."""

from __future__ import annotations

import contextlib
import decimal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from merakc.errors import RecordError
from merakc.frontend.calls.around import check_around, same_flags, without_modes
from merakc.frontend.record import record
from tests.frontend.against_eager import check
from tests.frontend.small import Small, linear, randn


class Doubled(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Doubles what `tanh` gives."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 2 if func is torch.ops.aten.tanh.default else out


class Tripled(TorchFunctionMode):
    """Triples it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 3 if func in (torch.tanh, Tensor.tanh) else out


def within(context: Callable[[], Any]) -> Callable[[Any, Tensor], Any]:
    def forward(s: Any, x: Tensor) -> Any:
        with context():
            return s.layer(x).tanh().sum()

    return forward


def hooks() -> Any:
    return saved_tensors_hooks(lambda t: t, lambda t: t * 2)


@contextlib.contextmanager
def pushed() -> Any:
    torch._C._autograd._push_saved_tensors_default_hooks(lambda t: t, lambda t: t * 2)
    yield
    torch._C._autograd._pop_saved_tensors_default_hooks()


@pytest.mark.parametrize(
    ("context", "message"),
    [
        (Doubled, "the forward enters the mode Doubled"),
        (hooks, "saved_tensors_hooks is entered"),
        (pushed, "saved_tensors_hooks is entered"),
    ],
)
def test_what_a_forward_enters(context: Callable[[], Any], message: str) -> None:
    model = Small(within(context), layer=linear())
    with pytest.raises(RecordError, match=rf"test_around.py:\d+: .*{message}|{message}"):
        record(model, (randn(4, 6),), {})


def test_modes_that_end_with_the_forward() -> None:
    check(Small(within(Tripled), layer=linear()), randn(4, 6))


@pytest.mark.parametrize("context", [Doubled, Tripled, hooks])
def test_what_is_entered_around_a_call(context: Callable[[], Any]) -> None:
    model = Small(within(contextlib.nullcontext), layer=linear())
    with context(), pytest.raises(RecordError, match="auto_parallel is called"):
        record(model, (randn(4, 6),), {})
    with FlopCounterMode(display=False), torch.device("cpu"):
        check_around("the model")


def test_what_was_replaced_is_put_back() -> None:
    push = torch.utils._python_dispatch._push_mode
    with without_modes(), FlopCounterMode(display=False):
        pass
    assert torch.utils._python_dispatch._push_mode is push


LEFT: dict[str, Callable[[], Any]] = {
    "the default dtype": lambda: torch.set_default_dtype(torch.float64),
    "autocast on cpu": lambda: torch.set_autocast_enabled("cpu", True),
    "the dtype of autocast on cpu": lambda: torch.set_autocast_dtype("cpu", torch.float16),
    "deterministic algorithms": lambda: torch.use_deterministic_algorithms(True),
    "the context of decimal": lambda: setattr(decimal.getcontext(), "prec", 3),
}


@pytest.mark.parametrize("name", LEFT)
def test_switches_that_a_forward_leaves_changed(name: str) -> None:
    def forward(s: Any, x: Tensor) -> Any:
        LEFT[name]()
        return s.layer(x).sum()

    with pytest.raises(RecordError, match=f"leaves {name} changed"):
        record(Small(forward, layer=linear()), (randn(4, 6),), {})
    with same_flags():  # all are as before
        pass
    assert torch.get_default_dtype() == torch.float32
    assert not torch.is_autocast_enabled("cpu")
    assert not torch.are_deterministic_algorithms_enabled()
    assert decimal.getcontext().prec == decimal.DefaultContext.prec
