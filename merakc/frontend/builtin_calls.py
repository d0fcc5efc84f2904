"""Python's `max` and `min` of whole numbers that the batch alone says, without a question.

`max(1, mask.sum().item())` is then a number of a graph that is right for all batches, where a
comparison has an answer for each.
"""

from __future__ import annotations

import builtins
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from merakc.frontend.history import replaced
from merakc.frontend.symbols import is_symbolic


@contextlib.contextmanager
def symbolic_builtins(is_known: Callable[[torch.Tensor], bool]) -> Iterator[None]:
    """Has them compute with whole numbers that are symbols, and with tensors of one whole number
    that are known. What may be no number is as ever: which of two is larger then hangs on their
    order.
    """

    def extreme(
        plain: Callable[..., Any], symbolic: Callable[..., Any], bound: str
    ) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if len(args) != 2 or kwargs:
                return plain(*args, **kwargs)
            tensors = [x for x in args if isinstance(x, FakeTensor)]
            others = [x for x in args if type(x) in (int, torch.SymInt)]
            if len(others) == 2 and is_symbolic(args):
                return symbolic(*args)
            if len(tensors) == len(others) == 1:
                (tensor,), (number,) = tensors, others
                whole = not (tensor.dtype.is_floating_point or tensor.dtype == torch.bool)
                if whole and tensor.dim() == 0 and not is_symbolic(number) and is_known(tensor):
                    return tensor.clamp(**{bound: number})
            return plain(*args)

        return call

    with (
        replaced(builtins, "max", extreme(builtins.max, torch.sym_max, "min")),
        replaced(builtins, "min", extreme(builtins.min, torch.sym_min, "max")),
    ):
        yield
