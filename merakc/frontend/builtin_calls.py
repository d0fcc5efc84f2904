"""Python's `max` and `min` of two numbers that the batch alone says, without a question.

`max(1, mask.sum().item())` is then a number of a graph that is right for all batches, where a
comparison has an answer for each.
"""

from __future__ import annotations

import builtins
import contextlib
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from merakc.frontend.replaced import replaced


@contextlib.contextmanager
def symbolic_builtins(known: Callable[[Any], Tensor | None]) -> Iterator[None]:
    """Has them compute with symbols and tensors of one number; `known` gives either as a tensor, if
    nothing but the batch stands before it.

    Of numbers that compare as neither larger nor smaller they give the first, as Python does.
    """

    def of_floats(better: Callable[[Any, Any], Tensor], one: Any, other: Any) -> Any:
        first, second = (x if type(x) in (int, float) else known(x) for x in (one, other))
        if first is None or second is None:
            return None
        found = torch.where(better(second, first), second, first)
        return found if isinstance(one, Tensor) or isinstance(other, Tensor) else found.item()

    def extreme(name: str, better: Callable[[Any, Any], Tensor]) -> Callable[..., Any]:
        plain, of_ints = getattr(builtins, name), getattr(torch, f"sym_{name}")

        def call(*args: Any, **kwargs: Any) -> Any:
            kinds = sorted(map(_kind, args)) if len(args) == 2 and not kwargs else []
            if kinds in (["int", "symint"], ["symint", "symint"]):
                return of_ints(*args)
            if kinds in TOGETHER and (found := of_floats(better, *args)) is not None:
                return found
            return plain(*args, **kwargs)

        return call

    with (
        replaced(builtins, "max", extreme("max", operator.gt)),
        replaced(builtins, "min", extreme("min", operator.lt)),
    ):
        yield


def _kind(value: Any) -> str:
    """What is compared: a number, a symbol or a tensor of one number."""
    if isinstance(value, FakeTensor):
        if value.dim() or value.dtype == torch.bool or value.is_complex():
            return ""
        return "tensor" if value.is_floating_point() else "int tensor"
    return type(value).__name__.lower() if type(value) in NUMBERS else ""


NUMBERS = (int, float, torch.SymInt, torch.SymFloat)
# Kinds of two arguments, sorted, that are compared as tensors: a whole number is kept as one.
TOGETHER = (
    ["int", "tensor"],
    ["float", "tensor"],
    ["int", "int tensor"],
    ["int", "symfloat"],
    ["float", "symfloat"],
    ["symfloat", "symfloat"],
)
