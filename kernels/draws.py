"""Random numbers without state: `merakc::dropout`, `merakc::uniform` and `merakc::normal`.

What is drawn is a hash of (seed, key, sample, index of the element within its sample): the same
however samples are spread over micro-batches and ranks and however a tensor is split, and drawn
again, rather than stored, in the backward, in recomputation and on another device.

All three ops end with `key, sample, sizes, starts, local_sizes` (dropout) or with these, `shape`
and `dtype`. `key` tells the calls of one step apart. The elements, in row-major order whatever
their shape, are the block of `local_sizes` at `starts` of an array of `sizes`. Dim `sample` of
that array counts samples, the first of which is number `first_sample` of the whole batch; with
`sample` -1 every sample is to have the same numbers. `seed` and `first_sample` are 0-dim int64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

# Where in a node's arguments `key` is, which `sample, sizes, starts, local_sizes` follow.
KEY_POSITION: Final[Mapping[str, int]] = {
    "merakc.dropout.default": 4,
    "merakc.uniform.default": 2,
    "merakc.normal.default": 2,
}

# Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators (OOPSLA 2014);
# the constants are Stafford's variant 13 of the 64-bit finaliser.
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB

# Elements hashed at a time on a CPU: their 8-byte numbers stay in its second-level cache.
_CHUNK = 2**15
# Bits of a number in [0, 1) of each dtype: those that it holds exactly, so that none rounds to 1.
_BITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
# Whole numbers of as many bytes as numbers of a dtype have.
_BITS_OF = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class Block(NamedTuple):
    """Which numbers are drawn: see the module."""

    key: int
    sample: int
    sizes: Sequence[int]
    starts: Sequence[int]
    local_sizes: Sequence[int]

    def verify(self, numel: int) -> None:
        """Asserts that the block lies in its array and has `numel` elements."""
        assert numel == math.prod(self.local_sizes), (numel, self)
        for full, start, size in zip(self.sizes, self.starts, self.local_sizes, strict=True):
            assert 0 <= start <= full - size, self
        assert -1 <= self.sample < len(self.sizes), self


def step_seed(seed: int, step: int) -> int:
    """The int64 that the ops are given as `seed` in a training step."""
    return _signed(seed * _GOLDEN_GAMMA + step)


def _signed(value: int) -> int:
    """The int64 with the same 64 low bits: what wrapping arithmetic would hold."""
    return (value + 2**63) % 2**64 - 2**63


def _shifted(x: Tensor, bits: int) -> Tensor:
    """X >>> bits. Torch shifts the sign in from the left: mask it out."""
    return (x >> bits).bitwise_and_(2 ** (64 - bits) - 1)


def _mix(x: Tensor) -> Tensor:
    """splitmix64's finaliser up to its last xor-shift, which leaves the high bits alone, in place.

    Enough where only a comparison of the whole number reads the result.
    """
    x = x.bitwise_xor_(_shifted(x, 30)).mul_(_signed(_MIX_1))
    return x.bitwise_xor_(_shifted(x, 27)).mul_(_signed(_MIX_2))


def _hash(x: Tensor) -> Tensor:
    """splitmix64's finaliser, in place."""
    x = _mix(x)
    return x.bitwise_xor_(_shifted(x, 31))


def _counters(seed: Tensor, first_sample: Tensor, block: Block) -> Iterator[Tensor]:
    """The numbers to be hashed for each element, in row-major order, in chunks.

    Element i of a sample reads place i of the splitmix64 stream that starts at a hash of the
    sample's number and of a hash of (seed, key); without samples, of the latter alone.
    """
    # Seeds and keys are small neighbouring numbers: hash them apart before they meet.
    mixed = _hash((seed + 1) * _signed(_GOLDEN_GAMMA))  # 0 is its own hash
    stream = _hash(mixed + _signed(block.key * _MIX_1)).reshape(1)
    rows = stream if block.sample < 0 else stream.new_zeros(1)
    stride = math.prod(full for k, full in enumerate(block.sizes) if k != block.sample)
    *outer, inner = block.local_sizes or (1,)
    whole = block.sample == len(outer) or seed.device.type != "cpu"
    width = inner if whole else min(inner, _CHUNK)
    columns, step = stream.new_zeros(1), 0
    for k, full in enumerate(block.sizes):
        if k > 0:
            rows = (rows.unsqueeze(1) + columns).flatten()
        if k == block.sample:
            first, count = block.starts[k], block.local_sizes[k]
            numbers = torch.arange(first, first + count, device=seed.device).add_(first_sample)
            columns = _hash(numbers.mul_(_signed(_GOLDEN_GAMMA)).add_(stream))
        else:
            stride //= full
            step = _signed(stride * _GOLDEN_GAMMA)
            if block.starts[k]:
                rows = rows + _signed(block.starts[k] * step)
            count = block.local_sizes[k] if k < len(outer) else width
            columns = torch.arange(count, device=seed.device).mul_(step)
    height = max(1, _CHUNK // width) if seed.device.type == "cpu" else len(rows)
    for top in range(0, len(rows), height):
        for left in range(0, inner, width):
            # Of a wide array the columns of one chunk serve all others, some places on.
            here = rows[top : top + height, None]
            here = here + _signed(left * step) if left else here
            yield here + columns[: inner - left]


def dropout_now(
    x: Tensor, seed: Tensor, first_sample: Tensor, p: float, *block_args: Any
) -> Tensor:
    """What `merakc::dropout` computes, past the dispatcher and autograd.

    Zeroes each element of x with probability `p` and multiplies the others by 1 / (1 - p). The
    result is contiguous.
    """
    block = Block(*block_args)
    block.verify(x.numel())
    assert 0.0 <= p <= 1.0, p
    out = x.new_empty(x.shape)
    threshold = round(p * 2**64) - 2**63
    if p == 0.0 or x.numel() == 0:
        return out.copy_(x)
    if threshold >= 2**63:
        return out.zero_()
    torch.mul(x, 1.0 / (1.0 - p), out=out)
    chunks = _counters(seed, first_sample, block)
    kept = torch.cat([(_mix(chunk) >= threshold).flatten() for chunk in chunks])
    # No bits or all of them: in a third of the time that a mask takes.
    bits = _BITS_OF[out.itemsize]
    out.view(bits).bitwise_and_(kept.view(torch.uint8).to(bits).neg_().view(x.shape))
    return out


def _uniform(
    seed: Tensor,
    first_sample: Tensor,
    key: int,
    sample: int,
    sizes: Sequence[int],
    starts: Sequence[int],
    local_sizes: Sequence[int],
    shape: Sequence[int],
    dtype: torch.dtype,
) -> Tensor:
    """Numbers in [0, 1), of as many bits as `dtype` holds: 53 for float64, 24 for float32."""
    block, bits = Block(key, sample, sizes, starts, local_sizes), _BITS[dtype]
    block.verify(math.prod(shape))
    if not math.prod(shape):
        return torch.empty(shape, dtype=dtype, device=seed.device)
    parts = [
        _shifted(_hash(chunk), 64 - bits).to(dtype).flatten()
        for chunk in _counters(seed, first_sample, block)
    ]
    return torch.cat(parts).mul_(2.0**-bits).view(tuple(shape))


def _normal(
    seed: Tensor,
    first_sample: Tensor,
    key: int,
    sample: int,
    sizes: Sequence[int],
    starts: Sequence[int],
    local_sizes: Sequence[int],
    shape: Sequence[int],
    dtype: torch.dtype,
) -> Tensor:
    """Numbers of mean 0 and variance 1: Box and Muller's (1958), from two hashes in float64."""
    block = Block(key, sample, sizes, starts, local_sizes)
    block.verify(math.prod(shape))
    if not math.prod(shape):
        return torch.empty(shape, dtype=dtype, device=seed.device)
    parts = []
    for chunk in _counters(seed, first_sample, block):
        first = _hash(chunk)
        second = _hash(first + _signed(_GOLDEN_GAMMA))
        # In (0, 1], of which the logarithm is finite.
        radius = (_shifted(first, 11) + 1).double().mul_(2.0**-53).log_().mul_(-2.0).sqrt_()
        angle = _shifted(second, 11).double().mul_(2.0**-53 * 2.0 * math.pi)
        parts.append(radius.mul_(angle.cos_()).to(dtype).flatten())
    return torch.cat(parts).view(tuple(shape))


def _fake_dropout(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


def _fake_draw(seed: Tensor, *args: Any) -> Tensor:
    *_, shape, dtype = args
    return seed.new_empty(shape, dtype=dtype)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, seed, first_sample, *ctx.rest = inputs
    ctx.save_for_backward(seed, first_sample)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    # Dropout is x times a constant diagonal matrix, so its backward is itself.
    return torch.ops.merakc.dropout(grad, *ctx.saved_tensors, *ctx.rest), *(None,) * 8


_BLOCK = "int key, int sample, int[] sizes, int[] starts, int[] local_sizes"
torch.library.define(
    "merakc::dropout", f"(Tensor x, Tensor seed, Tensor first_sample, float p, {_BLOCK}) -> Tensor"
)
torch.library.impl("merakc::dropout", "default", dropout_now)
torch.library.register_fake("merakc::dropout", _fake_dropout)
torch.library.register_autograd("merakc::dropout", _differentiate, setup_context=_save)
for _name, _call in (("uniform", _uniform), ("normal", _normal)):
    torch.library.define(
        f"merakc::{_name}",
        f"(Tensor seed, Tensor first_sample, {_BLOCK}, int[] shape, ScalarType dtype) -> Tensor",
    )
    torch.library.impl(f"merakc::{_name}", "default", _call)
    torch.library.register_fake(f"merakc::{_name}", _fake_draw)
