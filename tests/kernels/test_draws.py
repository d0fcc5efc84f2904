"""Counter-based draws: their statistics, their independence of any split, gradients, tracing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from merakc.kernels import draws
from merakc.kernels.draws import step_seed

N = 200_000


def _block(shape: Sequence[int], sample: int, part: Any) -> tuple[Any, ...]:
    """The last arguments of an op: all of an array of `shape`, or (sizes, starts, local sizes)."""
    return sample, *(part or (tuple(shape), (0,) * len(shape), tuple(shape)))


def dropout(
    x: Tensor, seed: Tensor, p: float, key: int, *part: Any, sample: int = -1, first: int = 0
) -> Tensor:
    """`merakc::dropout` of all of x, or of the block that `part` says."""
    args = x, seed, torch.tensor(first), p, key, *_block(x.shape, sample, part)
    out: Tensor = torch.ops.merakc.dropout(*args)
    return out


def draw(
    name: str,
    shape: Sequence[int],
    *part: Any,
    seed: int = 0,
    key: int = 0,
    sample: int = -1,
    first: int = 0,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """`merakc::uniform` or `merakc::normal`."""
    numbers = torch.tensor(seed), torch.tensor(first), key
    op = getattr(torch.ops.merakc, name)
    out: Tensor = op(*numbers, *_block(shape, sample, part), list(shape), dtype)
    return out


def _seed(value: int = 0) -> Tensor:
    return torch.tensor(value)


def _kept(p: float = 0.5, seed: int = 0, key: int = 0, n: int = N) -> Tensor:
    """1.0 where kept, else 0.0."""
    return (dropout(torch.ones(n, dtype=torch.float64), _seed(seed), p, key) > 0).double()


def _correlation(x: Tensor, y: Tensor) -> float:
    return torch.corrcoef(torch.stack([x, y]))[0, 1].item()


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("seed", [0, 1, -1, 2**62])
def test_share_of_dropped_elements(p: float, seed: int) -> None:
    deviation = math.sqrt(p * (1 - p) / N)
    assert abs(1.0 - _kept(p, seed).mean().item() - p) < 5 * deviation


def test_variance_over_blocks_is_binomial() -> None:
    p, blocks = 0.3, 1000
    sums = _kept(p).view(blocks, -1).sum(1)
    expected = N / blocks * p * (1 - p)
    # the variance of a sample variance: 2 / (n - 1), for sums that are nearly normal
    assert abs(sums.var().item() / expected - 1.0) < 5 * math.sqrt(2 / (blocks - 1))


@pytest.mark.parametrize("lag", [1, 2, 3, 7, 64, 768, 1024, 4096, 65536])
def test_neighbours_are_independent(lag: int) -> None:
    kept = _kept()
    assert abs(_correlation(kept[:-lag], kept[lag:])) < 5 / math.sqrt(N - lag)


@pytest.mark.parametrize("other", [(0, 1), (1, 0), (1, 1), (2, 0), (0, 2), (-1, 0), (0, 10**9)])
def test_seeds_and_keys_are_independent(other: tuple[int, int]) -> None:
    first, second = _kept(), _kept(seed=other[0], key=other[1])
    assert abs(_correlation(first, second)) < 5 / math.sqrt(N)
    for shift in (1, 5):  # nor is one stream the other, a few places on
        assert abs(_correlation(first[shift:], second[:-shift])) < 5 / math.sqrt(N)


def test_many_keys_at_one_place_are_uniform() -> None:
    kept = torch.stack([_kept(0.5, key=key, n=8) for key in range(2000)])
    assert (kept.mean(0) - 0.5).abs().max() < 5 * 0.5 / math.sqrt(2000)


def _mix(z: int) -> int:
    """splitmix64's finaliser in Python's integers."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


@pytest.mark.parametrize(("seed", "key"), [(0, 0), (7, 3), (-1, 10**12)])
def test_mask_is_the_documented_stream(seed: int, key: int) -> None:
    """Masks are part of what a plan means: they may not change between versions and devices."""
    golden = 0x9E3779B97F4A7C15
    state = _mix(_mix((seed + 1) * golden % 2**64) + key * 0xBF58476D1CE4E5B9 & 2**64 - 1)
    hashes = [_mix((state + i * golden) % 2**64) for i in range(500)]
    signed = [(h + 2**63) % 2**64 - 2**63 for h in hashes]
    expected = [float(h >= round(0.3 * 2**64) - 2**63) for h in signed]
    assert _kept(0.3, seed, key, 500).tolist() == expected
    sample = _mix((state + 9 * golden) % 2**64)
    numbers = [_mix((sample + i * golden) % 2**64) >> 11 for i in range(500)]
    found = draw("uniform", (1, 500), seed=seed, key=key, sample=0, first=9)
    assert found.flatten().tolist() == [n / 2**53 for n in numbers]


def test_values_are_zero_or_scaled() -> None:
    x = torch.randn(1000, dtype=torch.float64)
    out = dropout(x, _seed(), 0.25, 3)
    kept = out != 0
    assert 0 < kept.sum() < 1000
    torch.testing.assert_close(out[kept], x[kept] / 0.75, rtol=1e-15, atol=0.0)


def test_never_and_always() -> None:
    x = torch.tensor([1.0, -2.0, torch.inf])
    assert torch.equal(dropout(x, _seed(), 0.0, 0), x)
    assert torch.equal(dropout(x, _seed(), 1.0, 0), torch.zeros(3))


def test_dropped_infinities_are_zero() -> None:
    out = dropout(torch.full((100,), torch.inf), _seed(), 0.5, 0)
    assert set(out.tolist()) == {0.0, math.inf}


@st.composite
def _splits(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    full = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    starts = [draw(st.integers(0, size - 1)) for size in full]
    sizes = [draw(st.integers(0, size - i)) for size, i in zip(full, starts, strict=True)]
    return full, starts, sizes


@settings(max_examples=60, deadline=None)
@given(_splits(), st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**40))
def test_block_is_that_of_the_whole(
    split: tuple[list[int], list[int], list[int]], seed: int, key: int
) -> None:
    full, starts, sizes = split
    x = torch.rand(full) + 1.0
    block = tuple(slice(i, i + n) for i, n in zip(starts, sizes, strict=True))
    whole = dropout(x, _seed(seed), 0.5, key)
    flat = x[block].flatten()  # whatever its shape: the sizes say what it is
    local = dropout(flat, _seed(seed), 0.5, key, full, starts, sizes)
    assert torch.equal(local, whole[block].flatten())


@settings(max_examples=60, deadline=None)
@given(_splits(), st.integers(0, 3), st.integers(0, 2**40), st.sampled_from(["uniform", "normal"]))
def test_block_with_samples_is_that_of_the_whole(
    split: tuple[list[int], list[int], list[int]], sample: int, first: int, name: str
) -> None:
    full, starts, sizes = split
    sample %= len(full)
    block = tuple(slice(i, i + n) for i, n in zip(starts, sizes, strict=True))
    whole = draw(name, full, sample=sample, first=first)
    local = draw(name, [math.prod(sizes)], full, starts, sizes, sample=sample, first=first)
    assert torch.equal(local, whole[block].flatten())
    # The same samples, counted from another first one.
    sizes[sample], full[sample] = full[sample] - starts[sample], full[sample] - starts[sample]
    first, starts[sample] = first + starts[sample], 0
    block = (*block[:sample], slice(-full[sample], None), *block[sample + 1 :])
    local = draw(name, [math.prod(sizes)], full, starts, sizes, sample=sample, first=first)
    assert torch.equal(local, whole[block].flatten())


def test_a_sample_draws_alike_wherever_its_dim_is() -> None:
    front = draw("uniform", (3, 5, 7), sample=0, first=4)
    middle = draw("uniform", (5, 3, 7), sample=1, first=4)
    last = draw("uniform", (5, 7, 3), sample=2, first=4)
    assert torch.equal(front, middle.transpose(0, 1))
    assert torch.equal(front, last.movedim(2, 0))
    assert torch.equal(front[1], draw("uniform", (1, 35), sample=0, first=5).view(5, 7))
    assert len(front.unique()) == front.numel()


def test_samples_are_independent() -> None:
    kept = draw("uniform", (2, N // 2), sample=0)
    for shift in (0, 1, 5):
        other = kept[1, : N // 2 - shift]
        assert abs(_correlation(kept[0, shift:], other)) < 5 / math.sqrt(N // 2)
    assert not torch.equal(kept[0], draw("uniform", (N // 2,)))  # drawn without samples


@pytest.mark.parametrize("shape", [(50_001,), (3, 50_001), (50_001, 3), (2, 40_000, 2)])
@pytest.mark.parametrize("sample", [-1, 0, 1])
def test_chunks_join_seamlessly(shape: tuple[int, ...], sample: int) -> None:
    sample = min(sample, len(shape) - 1)
    whole = draw("uniform", shape, sample=sample, first=1)
    before, draws._CHUNK = draws._CHUNK, 2**30
    try:
        assert torch.equal(whole, draw("uniform", shape, sample=sample, first=1))
    finally:
        draws._CHUNK = before


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_uniform_numbers_fill_their_dtype(dtype: torch.dtype) -> None:
    bits = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}[dtype]
    found = draw("uniform", (N,), dtype=dtype)
    assert found.dtype == dtype
    places = found.double() * 2.0**bits
    assert torch.equal(places, places.floor())
    assert 0 <= found.min() < 0.01
    assert 0.99 < found.max() < 1
    assert (places.long() % 2).double().mean().item() == pytest.approx(0.5, abs=2.5 / math.sqrt(N))
    share = torch.histc(found.double(), 16, 0.0, 1.0) / N
    assert (share - 1 / 16).abs().max() < 5 * math.sqrt(1 / 16 / N)
    assert abs(_correlation(found.double()[1:], found.double()[:-1])) < 5 / math.sqrt(N)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_normal_numbers(dtype: torch.dtype) -> None:
    found = draw("normal", (N,), dtype=dtype).double()
    assert abs(found.mean().item()) < 5 / math.sqrt(N)
    assert found.var().item() == pytest.approx(1.0, abs=5 * math.sqrt(2 / N))
    below = torch.tensor([(found < x).double().mean().item() for x in (-2.0, -1.0, 0.0, 1.5)])
    expected = torch.special.ndtr(torch.tensor([-2.0, -1.0, 0.0, 1.5]))
    assert (below - expected).abs().max() < 5 * 0.5 / math.sqrt(N)
    assert abs(_correlation(found[1:], found[:-1])) < 5 / math.sqrt(N)


def test_seeds_of_steps_do_not_meet() -> None:
    found = {step_seed(seed, step) for seed in range(-50, 50) for step in range(100)}
    assert len(found) == 100 * 100
    assert all(-(2**63) <= seed < 2**63 for seed in found)


def test_nothing_is_drawn_for_no_elements() -> None:
    assert draw("uniform", (3, 0), sample=0).shape == (3, 0)
    assert draw("normal", (0,)).shape == (0,)
    assert dropout(torch.ones(0, 2), _seed(), 0.5, 0, sample=0).shape == (0, 2)
    assert draw("uniform", ()).shape == ()


def test_large_blocks_in_chunks() -> None:
    """Arrays over the size that is hashed at a time, in one dim and in several."""
    whole = dropout(torch.ones(3, 50_001), _seed(), 0.5, 0)
    last = dropout(torch.ones(2), _seed(), 0.5, 0, (3, 50_001), (2, 49_999), (1, 2))
    assert torch.equal(last, whole[2, -2:])
    assert torch.equal(whole.flatten(), dropout(torch.ones(150_003), _seed(), 0.5, 0))


def test_result_is_contiguous_for_any_layout() -> None:
    x = torch.randn(4, 1, 6).transpose(0, 2)
    assert dropout(x, _seed(), 0.5, 0).stride() == (4, 4, 1)
    assert torch.equal(dropout(x, _seed(), 0.5, 0), dropout(x.contiguous(), _seed(), 0.5, 0))


def test_half_precision_keeps_its_dtype_and_mask() -> None:
    half = dropout(torch.ones(1000, dtype=torch.bfloat16), _seed(), 0.5, 0)
    assert half.dtype == torch.bfloat16
    assert torch.equal(half.double() > 0, _kept(n=1000) > 0)


def test_gradient_has_the_forward_mask() -> None:
    x = torch.randn(30, 5, dtype=torch.float64, requires_grad=True)
    out = dropout(x, _seed(), 0.4, 7, (60, 5), (30, 0), (30, 5))
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(grad > 0, out != 0)
    assert torch.autograd.gradcheck(lambda x: dropout(x, _seed(), 0.4, 7), (x,))


def test_opcheck() -> None:
    x = torch.randn(3, 4).t().requires_grad_()
    args = (x, _seed(), _seed(), 0.5, 1, 0, [4, 6], [0, 3], [4, 3])
    torch.library.opcheck(torch.ops.merakc.dropout.default, args)
    block = (1, 0, [4, 6], [0, 3], [4, 3], [4, 3], torch.float32)
    for op in (torch.ops.merakc.uniform.default, torch.ops.merakc.normal.default):
        torch.library.opcheck(op, (_seed(), _seed(), *block))


def test_trace_of_forward_and_backward_runs() -> None:
    def loss_grad(x: Tensor, seed: Tensor) -> tuple[Tensor, ...]:
        loss = dropout(x.transpose(0, 1), seed, 0.5, 1).view(-1).square().sum()
        return loss, *torch.autograd.grad(loss, (x,))

    x = torch.randn(4, 6, requires_grad=True)
    graph = make_fx(loss_grad, tracing_mode="fake")(x, _seed(1))
    targets = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert targets.count("merakc.dropout.default") == 2
    for seed in (1, 2):
        ours, expected = graph(x.detach(), _seed(seed)), loss_grad(x, _seed(seed))
        assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


def test_blocks_outside_the_array_are_refused() -> None:
    with pytest.raises(AssertionError):
        dropout(torch.ones(2), _seed(), 0.5, 0, (4,), (3,), (2,))
    with pytest.raises(AssertionError):
        dropout(torch.ones(3), _seed(), 0.5, 0, (4,), (0,), (2,))
