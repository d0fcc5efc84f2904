"""Modes in which a model and its plan can be compared to many digits.

Both sides run under them: in float64 throughout, and without dropout, of which torch and merakc
draw different numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

# Calls of which the first argument comes out as it is where nothing is dropped.
DROPOUTS = frozenset(
    {
        F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout,
        torch.dropout, torch.dropout_, torch.alpha_dropout, torch.alpha_dropout_,
        torch.feature_dropout, torch.feature_dropout_, torch.feature_alpha_dropout,
        torch.feature_alpha_dropout_,
    }
)  # fmt: skip
# Calls that ask for no dtype, the commonest; and the one that gives the same bits in another.
_READ = ("shape", "dtype", "device", "requires_grad", "grad", "is_leaf", "layout", "data")
_AS_THEY_ARE = frozenset({torch.Tensor.view, *(getattr(torch.Tensor, n).__get__ for n in _READ)})
DROPOUT_POSITION = 4  # of scaled_dot_product_attention's rate among its arguments


class _LiftedCasts(TorchFunctionMode):
    """Puts float64 wherever a torch call is asked for float32, and gives torch the product of rows
    in groups that it then lacks: one mode, since each is called for every attribute of a tensor.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _AS_THEY_ARE:
            return func(*args, **(kwargs or {}))
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        if func is torch.Tensor.backward:
            with _LiftedBackward():  # type: ignore[no-untyped-call]
                return func(*args, **(kwargs or {}))  # type: ignore[no-untyped-call]
        if func is torch._grouped_mm and args[0].dtype == torch.float64:
            return _products(args[0], args[1], (kwargs or {})["offs"])
        if not kwargs:
            return func(*map(_lift, args))
        return func(*map(_lift, args), **{name: _lift(value) for name, value in kwargs.items()})


class _LiftedBackward(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The same of a backward, which torch runs without modes of functions: those that custom
    functions have written in Python cast, too.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.view.dtype:
            args, kwargs = pytree.tree_map(_lift, (args, kwargs))
        return func(*args, **(kwargs or {}))


class _WithoutDropout(TorchFunctionMode):
    """Drops nothing, whatever rates the model asks for."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = dict(kwargs or {})
        if func in DROPOUTS:
            return args[0] if args else named["input"]
        if func is F.scaled_dot_product_attention:
            args = [0.0 if k == DROPOUT_POSITION else a for k, a in enumerate(args)]
            named.pop("dropout_p", None)
        if func is F.multi_head_attention_forward:
            named["training"] = False  # which it reads for its dropout alone
        return func(*args, **named)


def _products(x: torch.Tensor, w: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """`F.grouped_mm` of rows in groups, which torch does not compute in float64."""
    sizes: list[int] = offs.diff(prepend=offs.new_zeros(1)).tolist()
    return torch.cat([rows @ own for rows, own in zip(torch.split(x, sizes), w, strict=True)])


def _lift(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


@contextmanager
def lifted_casts() -> Iterator[None]:
    """Turns the float32 casts in a model's own code (norms, softmax, losses) into float64.

    Without it a float64 model of transformers computes parts in float32, and its results can be
    compared to seven digits only.
    """
    with _LiftedCasts():
        yield


@contextmanager
def without_dropout() -> Iterator[None]:
    """Turns every dropout off; modules stay in the modes that they are in."""
    with _WithoutDropout():
        yield
