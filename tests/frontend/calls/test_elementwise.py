"""What elementwise calls return, as torch says it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from merakc.frontend.calls.elementwise import ADDMM, ELEMENTWISE, result_form
from merakc.kernels.ops import resolve_op

NUMBERS: dict[str, tuple[Any, ...]] = {
    "aten.pow.Tensor_Scalar": (2, 0.5, -1.0, 3),
    "aten.mul.Scalar": (2, 0.5, True),
    "aten.div.Scalar": (2, 0.5),
}
PAIRS = frozenset({"gelu_backward", "silu_backward", "tanh_backward"})
SHAPES = ((), (1,), (4,), (1, 1), (4, 1), (1, 4), (3, 4), (2, 3, 4), (2, 1, 4), (1, 3, 4), (3, 1),
          (0, 4), (1, 2, 3, 4), (2, 2, 3, 4), (2, 2, 1, 4), (2, 1, 3, 1))  # fmt: skip


def looks(x: Tensor) -> tuple[Any, ...]:
    return tuple(x.shape), x.stride(), x.storage_offset(), x.dtype


def laid_out(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Iterator[Tensor]:
    """Tensors of a shape: whole, of other orders of dims, parts of others, and expanded."""
    whole = torch.empty(shape, dtype=dtype, device="meta")
    yield whole
    if len(shape) > 1:
        for order in list(itertools.permutations(range(len(shape))))[1:4]:
            turned = torch.empty([shape[k] for k in order], dtype=dtype, device="meta")
            yield turned.permute([order.index(k) for k in range(len(shape))])
    if shape:
        yield torch.empty((*shape[:-1], 2 * shape[-1] + 1), dtype=dtype, device="meta")[
            ..., 1 : shape[-1] + 1
        ]
        yield torch.empty((*shape[:-1], 1), dtype=dtype, device="meta").expand(shape)
        yield torch.empty((1, *shape[1:]), dtype=dtype, device="meta").expand(shape)


def calls(op: str) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    short = op.split(".")[1]
    every = [x for shape in SHAPES for x in laid_out(shape)]
    if op in NUMBERS:
        yield from (((x, n), {}) for x in every for n in NUMBERS[op])
    elif op.endswith(".Tensor") or short in PAIRS:
        yield from (((x, y), {}) for x in every for y in every)
        yield from (((x, n), {}) for x in every for n in (2, 0.5, True) if short not in PAIRS)
        yield from (((x, x), {"alpha": 2}) for x in every if short in ("add", "sub"))
    else:
        yield from (((x,), {}) for x in every)
        yield from (((x,), {"approximate": "tanh"}) for x in every if short == "gelu")


@pytest.mark.parametrize("op", sorted(ELEMENTWISE))
def test_a_result_is_as_torch_says(op: str) -> None:
    """Of tensors that lie otherwise, are broadcast, or hold next to nothing."""
    func, told = resolve_op(op), 0
    for args, kwargs in calls(op):
        found = result_form(op, args, kwargs)
        if found is not None:
            told += 1
            assert found == looks(func(*args, **kwargs)), (op, args)
    assert told > 10


def test_a_sum_of_products_is_as_torch_says() -> None:
    func, told = resolve_op(ADDMM), 0
    for one, other, bias in itertools.product(
        laid_out((3, 4)), laid_out((4, 2)), (*laid_out((2,)), *laid_out((3, 2)), *laid_out((1,)))
    ):
        found = result_form(ADDMM, (bias, one, other), {})
        if found is not None:
            told += 1
            assert found == looks(func(bias, one, other))
    assert told > 10


def test_fake_tensors_of_the_cpu_look_the_same() -> None:
    for op in sorted(ELEMENTWISE):
        with FakeTensorMode():
            x = torch.empty(2, 3, 4).transpose(1, 2)
            rest = NUMBERS.get(op, ())[:1]
            if op.endswith(".Tensor") or op.split(".")[1] in PAIRS:
                rest = (torch.empty(2, 4, 3),)
            assert result_form(op, (x, *rest), {}) == looks(resolve_op(op)(x, *rest)), op


def test_what_is_rare_is_left_to_torch() -> None:
    x, whole = torch.empty(2, 3, device="meta"), torch.ones(2, 3, dtype=torch.int64, device="meta")
    half = x.to(torch.float16)
    turned = torch.empty(2, 3, dtype=torch.complex64, device="meta").conj().imag
    assert turned.is_neg()
    for op, args in (
        ("aten.add.Tensor", (x, whole)), ("aten.add.Tensor", (x, half)),
        ("aten.add.Tensor", (whole, 1)), ("aten.add.Tensor", (x, 1j)),
        ("aten.add.Tensor", (x, torch.empty(4, device="meta"))), ("aten.neg.default", (turned,)),
        ("aten.sum.default", (x,)), (ADDMM, (x, x, x)),
    ):  # fmt: skip
        assert result_form(op, args, {}) is None, (op, args)
    assert result_form(ADDMM, (x[0], x[:, :2], x), {"beta": 2}) is None
