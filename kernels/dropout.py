"""Dropout without state, `merakc::dropout`: what is kept follows from a seed and a position.

The mask is a hash of (seed, key, index in the full array), so it is the same however the array is
split over ranks, and it is computed again in the backward, in recomputation and on another device
rather than stored.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

# Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators (OOPSLA 2014);
# the constants are Stafford's variant 13 of the 64-bit finaliser.
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB

# Elements hashed at a time on a CPU: their 8-byte numbers stay in its second-level cache.
_CHUNK = 2**15


def dropout(
    x: Tensor,
    seed: Tensor,
    p: float,
    key: int,
    full_sizes: Sequence[int] | None = None,
    starts: Sequence[int] | None = None,
    local_sizes: Sequence[int] | None = None,
) -> Tensor:
    """Zeroes each element of x with probability `p` and multiplies the others by 1 / (1 - p).

    `seed` is a 0-dim int64 tensor, changed every step; `key` tells the calls of one step apart.
    The elements of x, in row-major order whatever its shape, are the block of `local_sizes` at
    `starts` of an array of `full_sizes`; left out, x is the whole array. The result is contiguous.
    """
    if full_sizes is None:
        full_sizes = x.shape
    starts = [0] * len(full_sizes) if starts is None else starts
    local_sizes = x.shape if local_sizes is None else local_sizes
    out: Tensor = torch.ops.merakc.dropout(x, seed, p, key, full_sizes, starts, local_sizes)
    return out


def _signed(value: int) -> int:
    """The int64 with the same 64 low bits: what wrapping arithmetic would hold."""
    return (value + 2**63) % 2**64 - 2**63


def _xor_shift(x: Tensor, bits: int) -> Tensor:
    """Computes x ^= x >>> bits in place. Torch shifts the sign in from the left: mask it out."""
    return x.bitwise_xor_((x >> bits).bitwise_and_(2 ** (64 - bits) - 1))


def _mix(x: Tensor) -> Tensor:
    """splitmix64's finaliser up to its last xor-shift, which leaves the high bits alone, in place.

    Only comparisons of the whole number read the result.
    """
    x = _xor_shift(x, 30).mul_(_signed(_MIX_1))
    return _xor_shift(x, 27).mul_(_signed(_MIX_2))


def _dropped(
    seed: Tensor,
    threshold: int,
    key: int,
    full_sizes: Sequence[int],
    starts: Sequence[int],
    sizes: Sequence[int],
) -> Tensor:
    """Whether the hash of each element of a block is under `threshold`, flat in row-major order.

    The hashes are the splitmix64 stream that starts at a hash of (seed, key), read at the
    elements' linear indices in the full array.
    """
    # Seeds and keys are small neighbouring numbers: hash them apart before they meet.
    state = _xor_shift(_mix(seed * _signed(_GOLDEN_GAMMA)), 31) + _signed(key * _MIX_1)
    state = _xor_shift(_mix(state), 31).reshape(1)
    steps = state.new_zeros(1)
    stride = math.prod(full_sizes)
    for full, start, size in zip(full_sizes, starts, sizes, strict=True):
        state = (state.unsqueeze(1) + steps).flatten()
        stride //= full
        steps = torch.arange(start, start + size, device=seed.device)
        steps *= _signed(stride * _GOLDEN_GAMMA)
    rows = max(1, _CHUNK // len(steps)) if seed.device.type == "cpu" else len(state)
    chunks = [state[first : first + rows, None] for first in range(0, len(state), rows)]
    return torch.cat([_mix(chunk + steps) < threshold for chunk in chunks]).flatten()


def _dropout(
    x: Tensor,
    seed: Tensor,
    p: float,
    key: int,
    full_sizes: Sequence[int],
    starts: Sequence[int],
    local_sizes: Sequence[int],
) -> Tensor:
    assert seed.dim() == 0, seed.shape
    assert seed.dtype == torch.int64, seed.dtype
    assert x.numel() == math.prod(local_sizes), (x.shape, local_sizes)
    for full, start, size in zip(full_sizes, starts, local_sizes, strict=True):
        assert 0 <= start <= full - size, (full_sizes, starts, local_sizes)
    assert 0.0 <= p <= 1.0, p
    out = x.new_empty(x.shape)
    threshold = round(p * 2**64) - 2**63
    if p == 0.0 or x.numel() == 0:
        return out.copy_(x)
    if threshold >= 2**63:
        return out.zero_()
    torch.mul(x, 1.0 / (1.0 - p), out=out)
    dropped = _dropped(seed, threshold, key, full_sizes, starts, local_sizes)
    return out.masked_fill_(dropped.view(x.shape), 0.0)


def _fake(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, seed, *ctx.rest = inputs
    ctx.save_for_backward(seed)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (seed,) = ctx.saved_tensors
    # Dropout is x times a constant diagonal matrix, so its backward is itself.
    return torch.ops.merakc.dropout(grad, seed, *ctx.rest), *(None,) * 6


torch.library.define(
    "merakc::dropout",
    "(Tensor x, Tensor seed, float p, int key, int[] full_sizes, int[] starts, int[] local_sizes)"
    " -> Tensor",
)
torch.library.impl("merakc::dropout", "default", _dropout)
torch.library.register_fake("merakc::dropout", _fake)
torch.library.register_autograd("merakc::dropout", _differentiate, setup_context=_save)
