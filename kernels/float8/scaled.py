"""Products of float8 numbers with a scale for each row: `merakc::scaled_linear`.

After torchao's recipe "rowwise_with_gw_hp": x [..., i] times the transpose of w [o, i] and, in the
backward, the gradient times w are products of e4m3 numbers; the gradient of w is a product in the
dtype of x, from x as it was. Each row of what is multiplied, along the dim that is summed, has a
scale of its own, from its largest magnitude: rows of a batch, and outputs of a weight, know nothing
of each other. Where an axis splits the summed dim, the largest magnitudes are maxima over its
ranks: its parts are quantized as the whole would be.

Scales are powers of two, so that only the cast rounds: the largest number of a row comes to lie
between 224 and 448, the largest e4m3 number. A row with what is not finite becomes NaN.

CUDA has torch's scaled products (`torch._scaled_mm`); elsewhere the numbers that the float8 ones
stand for are multiplied, in float32 or in the wider dtype of x.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from merakc.errors import ConfigError
from merakc.kernels.collectives import all_reduce

FLOAT8: Final = torch.float8_e4m3fn
SCALED_LINEAR: Final = "merakc.scaled_linear.default"
# What torch asks of a GPU for these products, and of the sizes of a matrix of float8.
LEAST_CAPABILITY: Final = (8, 9)
MULTIPLE: Final = 16
# Of a float32 in memory: bits of the fraction, the exponent field of 2^0 twice, and the fraction of
# 448 = 1.75 * 2^8.
_FRACTION_BITS, _TWICE_ONE = 23, 254
_LARGEST_EXPONENT, _LARGEST_FRACTION = 8, 0x600000


def check_device(device: torch.device, compute: torch.dtype) -> None:
    """Raises `ConfigError` where a GPU has no such products, or not of this dtype."""
    if device.type != "cuda":
        return
    own = torch.cuda.get_device_capability(device)
    if own < LEAST_CAPABILITY:
        found, least = (".".join(map(str, version)) for version in (own, LEAST_CAPABILITY))
        raise ConfigError(
            f"precision: {torch.cuda.get_device_name(device)}, of compute capability {found}, has "
            f'no products of float8, which need {least}; use precision="bf16-mixed"'
        )
    if compute != torch.bfloat16:
        raise ConfigError(
            f"precision: products of float8 beside {compute} are for tests on CPUs; on a GPU "
            'compute in bfloat16, as precision="fp8-mixed" does'
        )


def _exponents(largest: Tensor) -> Tensor:
    """The exponent fields of the least powers of two that bring each magnitude, divided by them, to
    448 or less.
    """
    bits = largest.view(torch.int32)
    fraction = bits & ((1 << _FRACTION_BITS) - 1)
    field = (bits >> _FRACTION_BITS) - _LARGEST_EXPONENT + (fraction > _LARGEST_FRACTION)
    return field.clamp(min=1)


def _powers(fields: Tensor) -> Tensor:
    return (fields << _FRACTION_BITS).view(torch.float32)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _row_amax(x: Tensor) -> Tensor:
    """The largest magnitude [..., 1] of each row of x [..., k], in float32."""
    out = _fake_row_amax(x)
    return out.copy_(x.abs().amax(-1, keepdim=True)) if x.shape[-1] else out.zero_()


def _quantized(x: Tensor, largest: Tensor) -> Tensor:
    """The rows of x [..., k], scaled by their largest magnitudes [..., 1], in float8."""
    inverse = _powers(_TWICE_ONE - _exponents(largest))
    inverse = inverse.masked_fill(~largest.isfinite(), torch.nan)  # casts of inf may give 448
    return (x.to(_wide(x.dtype)) * inverse).to(FLOAT8).contiguous()


def _scaled_mm(a: Tensor, of_a: Tensor, b: Tensor, of_b: Tensor, dtype: torch.dtype) -> Tensor:
    """The product [..., n] of rows a [..., k] and b [n, k], each with its largest magnitudes."""
    wide = _wide(dtype)
    product = F.linear(a.to(wide), b.to(wide))
    of_rows, of_columns = _powers(_exponents(of_a)), _powers(_exponents(of_b))
    return (product * of_rows * of_columns.t()).to(dtype)


def _scaled_mm_cuda(a: Tensor, of_a: Tensor, b: Tensor, of_b: Tensor, dtype: torch.dtype) -> Tensor:
    """Torch's kernels sum by rows only to bfloat16, and are fast only where they accumulate fast
    (torchao's recipes ask for it, too).
    """
    rows, (n, k) = a.shape[:-1], b.shape
    if not (a.numel() and b.numel()):
        return a.new_zeros((*rows, n), dtype=dtype)
    left, right = _padded(a.reshape(-1, k), 0), _padded(b, -n % MULTIPLE)
    of_rows = _powers(_exponents(of_a)).reshape(-1, 1)
    of_columns = F.pad(_powers(_exponents(of_b)), (0, 0, 0, -n % MULTIPLE), value=1.0)
    out = torch._scaled_mm(
        left, right.t(), of_rows, of_columns.t(), out_dtype=torch.bfloat16, use_fast_accum=True
    )
    return out[:, :n].to(dtype, memory_format=torch.contiguous_format).view(*rows, n)


def _padded(x: Tensor, rows: int) -> Tensor:
    """Float8 numbers [m, k] with zeros behind them: so many rows, and columns to a multiple."""
    columns = -x.shape[1] % MULTIPLE
    if not (rows or columns):
        return x
    return F.pad(x.view(torch.uint8), (0, columns, 0, rows)).view(FLOAT8)  # 0 is 0 in both


def _product(a: Tensor, b: Tensor, axis: str) -> Tensor:
    """Rows a [..., k] times rows b [n, k], of which the ranks of an axis have parts of k."""
    sides: list[Tensor] = []
    for side in (a, b):
        largest = torch.ops.merakc.row_amax(side)
        largest = all_reduce(largest, axis, "max") if axis else largest
        sides += [torch.ops.merakc.quantized(side, largest), largest]
    out: Tensor = torch.ops.merakc.scaled_mm(*sides, a.dtype)
    return out


class _ScaledLinear(torch.autograd.Function):
    """Both directions of `merakc::scaled_linear`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, inner: str, outer: str) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.outer = outer
        return _product(x, w, inner)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,), (x, w) = grads, ctx.saved_tensors
        of_x = of_w = None
        if ctx.needs_input_grad[0]:
            of_x = _product(grad, w.t(), ctx.outer)
        if ctx.needs_input_grad[1]:
            of_w = grad.flatten(0, -2).t() @ x.flatten(0, -2)
        return of_x, of_w, None, None


def scaled_linear(x: Tensor, w: Tensor, inner: str = "", outer: str = "") -> Tensor:
    """X [..., i] times the transpose of w [o, i], as this module says, giving [..., o].

    `inner` and `outer` name the axes over which i and o are split, if they are: what this rank
    gives, or makes of a gradient, is then its part of a sum.
    """
    out: Tensor = _ScaledLinear.apply(x, w, inner, outer)  # type: ignore[no-untyped-call]
    return out


# Registration


def _fake_row_amax(x: Tensor) -> Tensor:
    with torch._C.DisableTorchFunction():  # a mode that lifts casts
        return x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)


def _fake_quantized(x: Tensor, largest: Tensor) -> Tensor:
    return x.new_empty(x.shape, dtype=FLOAT8)


def _fake_scaled_mm(a: Tensor, of_a: Tensor, b: Tensor, of_b: Tensor, dtype: torch.dtype) -> Tensor:
    assert a.shape[-1] == b.shape[-1], (a.shape, b.shape)
    return a.new_empty((*a.shape[:-1], b.shape[0]), dtype=dtype)


torch.library.define("merakc::row_amax", "(Tensor x) -> Tensor")
torch.library.define("merakc::quantized", "(Tensor x, Tensor largest) -> Tensor")
torch.library.define(
    "merakc::scaled_mm",
    "(Tensor a, Tensor of_a, Tensor b, Tensor of_b, ScalarType dtype) -> Tensor",
)
torch.library.define(
    "merakc::scaled_linear", "(Tensor x, Tensor w, str inner='', str outer='') -> Tensor"
)
torch.library.impl("merakc::row_amax", "default", _row_amax)
torch.library.impl("merakc::quantized", "default", _quantized)
torch.library.impl("merakc::scaled_mm", "default", _scaled_mm)
torch.library.impl("merakc::scaled_mm", "cuda", _scaled_mm_cuda)
torch.library.register_fake("merakc::row_amax", _fake_row_amax)
torch.library.register_fake("merakc::quantized", _fake_quantized)
torch.library.register_fake("merakc::scaled_mm", _fake_scaled_mm)
# Made of the others: what traces it sees them.
torch.library.impl("merakc::scaled_linear", "CompositeImplicitAutograd", scaled_linear)
