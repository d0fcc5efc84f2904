"""Every binding against the op that it stands for: values, dtypes, strides, memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from merakc.kernels.bindings import BINDINGS
from merakc.kernels.ops import resolve_op

DTYPES = (torch.float32, torch.float64, torch.bfloat16)
Case = Callable[[torch.dtype], list[tuple[tuple[Any, ...], dict[str, Any]]]]


def draw(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def positive(*shape: int, dtype: torch.dtype) -> Tensor:
    return draw(*shape, dtype=dtype).abs() + 0.1


def flags(*shape: int) -> Tensor:
    return draw(*shape, dtype=torch.float32) > 0


def whole(*shape: int) -> Tensor:
    return (draw(*shape, dtype=torch.float32) * 5).long()


def softmaxed(t: torch.dtype) -> Tensor:
    return torch.softmax(draw(3, 4, dtype=t), -1)


PAIRS: Case = lambda t: [  # noqa: E731
    ((draw(3, 4, dtype=t), draw(4, dtype=t)), {}),
    ((draw(4, 3, dtype=t).t(), draw(3, 4, dtype=t)), {}),
    ((draw(3, 4, dtype=t), draw(1, dtype=t).reshape(())), {}),
    ((draw(3, 4, dtype=t), 0.7), {}),
    ((draw(3, 4, dtype=t), 2), {}),
    ((whole(3, 4), 2), {}),
    ((whole(3, 4), draw(3, 4, dtype=t)), {}),
]
TENSORS: Case = lambda t: [  # noqa: E731
    (args, {}) for args, _ in PAIRS(t) if isinstance(args[1], Tensor)
]  # fmt: skip
SCALED: Case = lambda t: [  # noqa: E731
    *PAIRS(t), ((draw(3, 4, dtype=t), draw(3, 4, dtype=t)), {"alpha": 0.3})
]  # fmt: skip
NUMBERS: Case = lambda t: [  # noqa: E731
    ((draw(3, 4, dtype=t), 0.7), {}), ((draw(4, 3, dtype=t).t(), 2), {}), ((whole(3, 4), 2), {})
]  # fmt: skip
FLAGS: Case = lambda _: [  # noqa: E731
    ((flags(3, 4), flags(4)), {}), ((whole(3, 4), whole(3, 4)), {})
]  # fmt: skip
SAME: Case = lambda t: [((draw(3, 4, dtype=t), draw(3, 4, dtype=t)), {})]  # noqa: E731
MATRIX: Case = lambda t: [  # noqa: E731
    ((draw(3, 4, dtype=t),), {}), ((draw(4, 3, dtype=t).t(),), {})
]  # fmt: skip

CASES: dict[str, Case] = {
    **dict.fromkeys(("add", "sub"), SCALED),
    **dict.fromkeys(("mul", "div"), PAIRS),
    **dict.fromkeys(["eq", "ne", "lt", "le", "gt", "ge"], TENSORS),
    **{f"{name}.Scalar": NUMBERS for name in ("mul", "div", "eq", "ne", "lt", "le", "gt", "ge")},
    **dict.fromkeys(("bitwise_and", "bitwise_or", "bitwise_xor"), FLAGS),
    **dict.fromkeys(("logical_and", "logical_or"), FLAGS),
    **dict.fromkeys(("maximum", "minimum"), SAME),
    **dict.fromkeys(("log", "rsqrt", "sqrt"), lambda t: [((positive(3, 4, dtype=t),), {})]),
    **dict.fromkeys(("bitwise_not", "logical_not"), lambda _: [((flags(3, 4),), {})]),
    "_log_softmax": lambda t: [((draw(3, 4, dtype=t), -1, False), {})],
    "_log_softmax_backward_data": lambda t: [
        ((draw(3, 4, dtype=t), softmaxed(t).log(), 1, t), {})
    ],
    "_softmax": lambda t: [((draw(3, 4, dtype=t), 1, False), {})],
    "_softmax_backward_data": lambda t: [((draw(3, 4, dtype=t), softmaxed(t), 1, t), {})],
    "_unsafe_view": lambda t: [((draw(3, 4, dtype=t), (2, 6)), {})],
    "addmm": lambda t: [
        ((draw(5, dtype=t), draw(3, 4, dtype=t), draw(4, 5, dtype=t)), {}),
        ((draw(5, dtype=t), draw(3, 4, dtype=t), draw(5, 4, dtype=t).t()), {"beta": 2.0}),
    ],
    "amax": lambda t: [((draw(3, 4, dtype=t), (1,), True), {}), ((draw(3, 4, dtype=t),), {})],
    "baddbmm": lambda t: [
        ((draw(2, 3, 5, dtype=t), draw(2, 3, 4, dtype=t), draw(2, 4, 5, dtype=t)), {"alpha": 2.0})
    ],
    "bmm": lambda t: [((draw(2, 3, 4, dtype=t), draw(2, 5, 4, dtype=t).mT), {})],
    "cat": lambda t: [(([draw(3, 4, dtype=t), draw(3, 2, dtype=t)], -1), {})],
    "clone": lambda t: [
        *MATRIX(t), ((draw(4, 3, dtype=t).t(),), {"memory_format": torch.contiguous_format})
    ],
    "constant_pad_nd": lambda t: [((draw(3, 4, dtype=t), (1, 2), 0.5), {})],
    "cumsum": lambda t: [((draw(3, 4, dtype=t), 1), {}), ((flags(3, 4), 0), {})],
    "embedding": lambda t: [((draw(9, 4, dtype=t), whole(3).abs() % 9, 1), {})],
    "expand": lambda t: [((draw(3, 1, dtype=t), size), {}) for size in ((2, 3, 4), (-1, 4))],
    "gather": lambda t: [((draw(3, 4, dtype=t), 1, whole(3, 2).abs() % 4), {})],
    "gelu": lambda t: [((draw(3, 4, dtype=t),), {"approximate": a}) for a in ("none", "tanh")],
    "index_select": lambda t: [((draw(3, 4, dtype=t), 1, whole(6).abs() % 4), {})],
    "leaky_relu": lambda t: [((draw(3, 4, dtype=t), 0.2), {})],
    "linear": lambda t: [((draw(2, 3, 4, dtype=t), draw(5, 4, dtype=t), draw(5, dtype=t)), {})],
    "masked_fill.Scalar": lambda t: [((draw(3, 4, dtype=t), flags(4), -1.5), {})],
    "masked_fill.Tensor": lambda t: [
        ((draw(3, 4, dtype=t), flags(4), draw(1, dtype=t).reshape(())), {})
    ],
    "mean": MATRIX,
    "mean.dim": lambda t: [((draw(3, 4, dtype=t), *a), {}) for a in (((-1,), True), ((0, 1),))],
    "mm": lambda t: [((draw(4, 3, dtype=t).t(), draw(4, 5, dtype=t)), {})],
    "native_layer_norm": lambda t: [
        ((draw(2, 3, 4, dtype=t), (4,), draw(4, dtype=t), draw(4, dtype=t), 1e-5), {}),
        ((draw(2, 3, 4, dtype=t), (4,), None, None, 1e-5), {}),
    ],
    "permute": lambda t: [((draw(2, 3, 4, dtype=t), (2, 0, -2)), {})],
    "pow.Tensor_Scalar": lambda t: [((draw(3, 4, dtype=t), e), {}) for e in (2, 3.0)],
    "pow.Tensor_Tensor": lambda t: [((positive(3, 4, dtype=t), draw(4, dtype=t)), {})],
    "pow.Scalar": lambda t: [((2.5, draw(3, 4, dtype=t)), {})],
    "rsub": lambda t: [((draw(3, 4, dtype=t), 1.5), {}), ((draw(3, 4, dtype=t), 1, 2), {})],
    "select": lambda t: [((draw(2, 3, 4, dtype=t), 1, -1), {})],
    "split": lambda t: [((draw(3, 4, dtype=t), 3, -1), {})],
    "split_with_sizes": lambda t: [((draw(3, 4, dtype=t), (1, 3), 1), {})],
    "squeeze": lambda t: [((draw(3, 1, 4, dtype=t),), {})],
    "squeeze.dim": lambda t: [((draw(3, 1, 4, dtype=t), 1), {}), ((draw(3, 1, 4, dtype=t), 0), {})],
    "squeeze.dims": lambda t: [((draw(3, 1, 4, 1, dtype=t), (1, 3)), {})],
    "stack": lambda t: [(([draw(3, 4, dtype=t), draw(3, 4, dtype=t)], 1), {})],
    "sum": lambda t: [*MATRIX(t), ((draw(3, 4, dtype=t),), {"dtype": torch.float64})],
    "sum.dim_IntList": lambda t: [
        ((draw(3, 4, dtype=t), (0,), True), {}),
        ((draw(3, 4, dtype=t), None, False), {"dtype": torch.float64}),
    ],
    "t": MATRIX,
    "transpose": lambda t: [((draw(2, 3, 4, dtype=t), -2, 0), {})],
    "tril": lambda t: [((draw(3, 4, dtype=t), 1), {}), ((flags(4, 4),), {})],
    "triu": lambda t: [((draw(3, 4, dtype=t), -1), {}), ((flags(4, 4),), {})],
    "unbind": lambda t: [((draw(3, 4, dtype=t), 1), {})],
    "unsqueeze": lambda t: [((draw(3, 4, dtype=t), -1), {})],
    "view": lambda t: [((draw(3, 4, dtype=t), (-1, 2)), {})],
    "where": lambda t: [((flags(3, 4), draw(4, dtype=t), draw(3, 1, dtype=t)), {})],
}  # fmt: skip


def cases(op: str, dtype: torch.dtype) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    _, name, overload = op.split(".")
    made = CASES.get(f"{name}.{overload}") or CASES.get(name) or MATRIX
    return made(dtype)


def described(found: Any, given: list[Tensor]) -> list[Any]:
    """All that can be told of results: bits, layout, and in which argument's memory they are."""
    tensors = found if isinstance(found, (tuple, list)) else [found]
    return [
        (
            x.dtype,
            x.shape,
            x.stride(),
            x.storage_offset(),
            [y.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for y in given],
            x.flatten().tolist() if x.dtype != torch.bfloat16 else x.float().flatten().tolist(),
        )
        for x in tensors
    ]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", BINDINGS)
def test_it_makes_what_the_op_makes(op: str, dtype: torch.dtype) -> None:
    for args, kwargs in cases(op, dtype):
        given = [a for a in args if isinstance(a, Tensor)]
        wanted = described(resolve_op(op)(*args, **kwargs), given)
        found = described(BINDINGS[op](*args, **kwargs), given)
        assert str(found) == str(wanted)  # as text, a NaN is a NaN


def test_a_view_of_what_does_not_lie_so_is_a_copy() -> None:
    """Traced where a copy stood in between that the compiler has removed since."""
    x = torch.arange(6).view(2, 3).T  # aten.view would refuse it
    for op in ("aten.view.default", "aten._unsafe_view.default"):
        assert torch.equal(BINDINGS[op](x, (6,)), x.reshape(6))
