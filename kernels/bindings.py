"""ATen ops by torch's own Python bindings: the same kernels, for a fraction of the call.

`torch.ops.aten.mm.default(a, b)` boxes every argument by the op's schema; `torch.mm(a, b)` parses
them with a parser that was made for it. In a step of small layers that is most of the time. Listed
are the ops whose binding takes the arguments of the op, in its order and under its names, and makes
of them what the op makes: values, strides and memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

_UNARY = (
    "abs bitwise_not ceil cos erf exp floor isfinite isinf isnan log logical_not neg reciprocal "
    "relu round rsqrt sigmoid sign sin sqrt tanh"
)
# No `add.Scalar` nor `sub.Scalar`: their third argument has other places.
_BINARY = {
    "Tensor": "add sub mul div eq ne lt le gt ge bitwise_and bitwise_or bitwise_xor",
    "Scalar": "mul div eq ne lt le gt ge",
    "default": "maximum minimum logical_and logical_or",
}
# Their overloads are told apart by the kinds of arguments.
_OTHERS = {
    "_log_softmax": "default",
    "_log_softmax_backward_data": "default",
    "_softmax": "default",
    "_softmax_backward_data": "default",
    "addmm": "default",
    "amax": "default",
    "baddbmm": "default",
    "bmm": "default",
    "cat": "default",
    "clone": "default",
    "constant_pad_nd": "default",
    "cumsum": "default",
    "embedding": "default",
    "gather": "default",
    "index_select": "default",
    "masked_fill": "Scalar Tensor",
    "mean": "default dim",
    "mm": "default",
    "native_layer_norm": "default",
    "permute": "default",
    "pow": "Tensor_Scalar Tensor_Tensor Scalar",
    "rsub": "Scalar",
    "select": "int",
    "split_with_sizes": "default",
    "squeeze": "default dim dims",
    "stack": "default",
    "sum": "default dim_IntList",
    "t": "default",
    "transpose": "int",
    "tril": "default",
    "triu": "default",
    "unbind": "int",
    "unsqueeze": "default",
    "where": "self",
}
_ELSEWHERE: Mapping[str, Callable[..., Any]] = {
    "aten._unsafe_view.default": torch.reshape,
    # Traced where a copy stood in between that the compiler has removed since: what was
    # contiguous then may need a copy now.
    "aten.view.default": torch.reshape,
    "aten.expand.default": torch.Tensor.expand,
    "aten.gelu.default": torch._C._nn.gelu,
    "aten.leaky_relu.default": torch._C._nn.leaky_relu,
    "aten.linear.default": torch._C._nn.linear,
    "aten.silu.default": torch._C._nn.silu,
    "aten.split.Tensor": torch._VF.split,  # type: ignore[attr-defined]
}


def _listed() -> Iterator[tuple[str, str]]:
    yield from ((name, "default") for name in _UNARY.split())
    for overload, names in _BINARY.items():
        yield from ((name, overload) for name in names.split())
    for name, overloads in _OTHERS.items():
        yield from ((name, overload) for overload in overloads.split())


BINDINGS: Mapping[str, Callable[..., Any]] = {
    f"aten.{name}.{overload}": getattr(torch._VF, name) for name, overload in _listed()
} | dict(_ELSEWHERE)
