"""The forms of what elementwise calls return, by torch's rule for them.

torch's own code of that rule is written in Python, and takes several times as long: it allows for
what is rare, and left to it here. Of floating tensors of one dtype and of numbers, a result has
that dtype and the shape that all of them broadcast to. Its dims lie in memory as those of the first
tensor do that has strides of its own for each; elements lie close together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

Form = tuple[tuple[int, ...], tuple[int, ...], int, torch.dtype]
"""Shape, stride, offset in the memory, dtype."""

ELEMENTWISE = frozenset(
    f"aten.{name}"
    for name in (
        "add.Tensor", "cos.default", "div.Scalar", "div.Tensor", "exp.default", "gelu.default",
        "gelu_backward.default", "mul.Scalar", "mul.Tensor", "neg.default", "pow.Tensor_Scalar",
        "relu.default", "rsqrt.default", "sigmoid.default", "silu.default",
        "silu_backward.default", "sin.default", "sub.Tensor", "tanh.default",
        "tanh_backward.default",
    )
)  # fmt: skip
ADDMM = "aten.addmm.default"
_NUMBERS = (int, float, str)  # and bool, which is an int


def result_form(op: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Form | None:
    """What a call on tensors without data returns, in memory of its own; None where torch is to
    say it.
    """
    if op not in ELEMENTWISE and op != ADDMM:
        return None
    given = [a for a in args if isinstance(a, torch.Tensor)]
    others = [a for a in (*args, *kwargs.values()) if not isinstance(a, torch.Tensor)]
    dtype = given[0].dtype if given else torch.bool
    if not dtype.is_floating_point or not all(isinstance(a, _NUMBERS) for a in others):
        return None
    if any(x.dtype != dtype or x.is_neg() for x in given):
        return None
    if op == ADDMM:
        return _sum_of_products(given, dtype) if len(given) == 3 and not others else None
    shape, strides = given[0].shape, None
    if all(_fits(x.shape, shape) for x in given[1:]):
        strides = _close_together(shape, given[0].stride())
    if strides is None and all(x.stride() == _contiguous(x.shape) for x in given):
        shape = max((x.shape for x in given), key=len)
        if min(shape, default=2) > 1 and all(_fits(x.shape, shape) for x in given):
            strides = _contiguous(shape)
    return None if strides is None else (tuple(shape), strides, 0, dtype)


def _fits(shape: Sequence[int], whole: Sequence[int]) -> bool:
    """Whether a tensor of one shape is broadcast to the other."""
    missing = len(whole) - len(shape)
    return shape == whole or (
        missing >= 0 and all(n in (1, m) for n, m in zip(shape, whole[missing:], strict=True))
    )


def _close_together(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...] | None:
    """Strides of the same order of dims, without gaps; None where these leave the order open."""
    if min(shape, default=2) < 2 or 0 in strides or len(set(strides)) < len(strides):
        return None
    found, step = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=strides.__getitem__):
        found[dim] = step
        step *= shape[dim]
    return tuple(found)


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple([math.prod([max(n, 1) for n in shape[k + 1 :]]) for k in range(len(shape))])


def _sum_of_products(given: Sequence[torch.Tensor], dtype: torch.dtype) -> Form | None:
    bias, one, other = (x.shape for x in given)
    if len(one) != 2 or len(other) != 2 or one[1] != other[0] or min(*one, *other) < 2:
        return None
    shape = one[0], other[1]
    return (shape, (shape[1], 1), 0, dtype) if _fits(bias, shape) else None
