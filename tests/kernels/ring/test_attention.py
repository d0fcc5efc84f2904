"""Attention over blocks that pass by, on forked gloo ranks, beside attention of one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.ranks import run_ranks
from merakc.kernels.attention import attention
from merakc.kernels.ring.attention import Ring, working_bytes
from merakc.kernels.ring.pieces import halves
from tests.kernels.bound import bind

KINDS = ("plain", "causal", "sink", "mask", "causal mask", "columns", "window")
WINDOW = 2


def _mask(kind: str, count: int, draw: torch.Generator) -> Tensor | None:
    """Of which some rows see nothing, and some nothing of a block."""
    if "mask" in kind:
        return torch.rand(2, 1, count, count, generator=draw) < 0.3
    if kind == "columns":
        return torch.rand(2, 1, 1, count, generator=draw) < 0.5
    if kind == "window":
        return torch.ones(count, count, dtype=torch.bool).tril_().triu_(1 - WINDOW)
    return None


def _compare(kind: str, count: int, swapped: bool) -> float:
    """The largest difference of the result and all gradients."""
    rank, ranks = bind("cp"), dist.get_world_size()
    draw = torch.Generator().manual_seed(count)
    q, k, v = (
        torch.randn(2, h, count, d, generator=draw, dtype=torch.float64, requires_grad=True)
        for h, d in ((4, 6), (2, 6), (2, 5))
    )
    sink = torch.randn(4, generator=draw, dtype=torch.float64, requires_grad=True)
    given = [q, k, v] + [sink] * (kind == "sink")
    causal, mask = kind in ("causal", "sink", "causal mask"), _mask(kind, count, draw)
    own_sink = sink if kind == "sink" else None
    wanted = attention(q, k, v, mask, causal, 0.3, 0, own_sink)
    weights = torch.randn(wanted.shape, generator=draw, dtype=torch.float64)
    grads = torch.autograd.grad((wanted * weights).sum(), given)

    rows = [len(part) for part in torch.arange(count).tensor_split(ranks)]
    stay, go = halves(rows)
    at = sum(rows[:rank])
    own = slice(at, at + rows[rank])
    parts = [x[:, :, own] for x in (q, k, v)]
    if mask is not None and mask.shape[-2] > 1:
        mask = mask[..., own, :]
        mask = (
            torch.ops.merakc.swap(mask, "cp", mask.dim() - 2, stay, go, rank) if swapped else mask
        )
    if swapped:
        parts = [torch.ops.merakc.swap(x, "cp", 2, stay, go, rank) for x in parts]
    hops = (0, 1) if kind == "window" and not swapped and ranks > 2 else range(ranks)
    place = ("cp", rows, [*hops], swapped, rank)
    causal = causal or kind == "window"
    out = torch.ops.merakc.ring_attention(*parts, mask, causal, 0.3, own_sink, *place)[0]
    assert out.transpose(1, 2).is_contiguous()
    if swapped:
        out = torch.ops.merakc.swap(out, "cp", 2, stay, go[::-1], rank)
    found = torch.autograd.grad((out * weights[:, :, own]).sum(), given)
    errors = [(out - wanted[:, :, own]).abs().max().item()]
    for mine, whole in zip(found[:3], grads, strict=False):
        errors.append((mine[:, :, own] - whole[:, :, own]).abs().max().item())
    if kind == "sink":
        total = found[3].clone()
        dist.all_reduce(total)
        errors.append((total - grads[3]).abs().max().item())
    return max(errors)


def _every(counts: tuple[int, ...]) -> dict[str, float]:
    return {
        f"{kind} {count} {swapped}": _compare(kind, count, swapped)
        for kind in KINDS
        for count in counts
        for swapped in (False, True)
        if not swapped or kind not in ("plain", "mask", "columns")
    }


@pytest.mark.parametrize(
    ("ranks", "counts"), [(1, (5,)), (2, (2, 13)), (3, (3, 14)), (4, (12, 18))]
)
def test_results_and_gradients_are_those_of_one_process(
    ranks: int, counts: tuple[int, ...]
) -> None:
    for found in run_ranks(ranks, _every, counts):
        assert max(found.values()) < 1e-12, found


def _half_precision() -> float:
    """The largest difference of a gradient from that of float32."""
    rank, draw = bind("cp"), torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 12, 4, generator=draw).bfloat16() for _ in range(3))
    q.mul_(4.0)
    own = [x[:, :, 4 * rank : 4 * rank + 4].requires_grad_() for x in (q, k, v)]
    place = ("cp", [4] * 3, [0, 1, 2], False, rank)
    out = torch.ops.merakc.ring_attention(*own, None, False, 0.5, None, *place)[0]
    found = torch.autograd.grad(out.sum(), own)
    assert out.dtype == torch.bfloat16
    whole = [x.float().requires_grad_() for x in (q, k, v)]
    wanted = torch.autograd.grad(attention(*whole, scale=0.5).sum(), whole)
    rows = slice(4 * rank, 4 * rank + 4)
    pairs = zip(found, wanted, strict=True)
    return max((f.float() - w[:, :, rows]).abs().max().item() for f, w in pairs)


def test_half_precision_is_as_far_off_as_it_rounds() -> None:
    assert max(run_ranks(3, _half_precision)) < 0.03


def _opcheck() -> None:
    rank = bind("cp")
    q, k, v = (torch.randn(1, 2, 4, 4).requires_grad_() for _ in range(3))
    args = (None, True, 0.5, None, "cp", (4,), (0,), False, rank)
    torch.library.opcheck(torch.ops.merakc.ring_attention.default, (q, k, v, *args))


def test_opcheck() -> None:
    run_ranks(1, _opcheck)


def test_blocks_move_on_by_the_hops_between_them() -> None:
    ring = Ring("cp", (4, 3, 3, 3), (0, 1, 3), False, 1)
    assert [ring.block(hop) for hop in ring.hops] == [1, 0, 2]
    assert ring.steps() == [(1, 1), (2, 3)]
    assert ring.count(0) == 4


def test_two_blocks_are_held_whatever_the_ranks() -> None:
    shapes = [(1, 4, 8, 2), (1, 2, 8, 2), (1, 2, 8, 2)]
    forward, backward = (
        working_bytes(shapes, torch.bfloat16, 16, backward=back) for back in (False, True)
    )
    assert forward == 2 * 64 * 2 + 64 * (4 + 2)
    assert backward == forward + 64 * (2 * 4 + 2)
    assert working_bytes(shapes, torch.bfloat16, 1, backward=False) == 64 * (4 + 2)
