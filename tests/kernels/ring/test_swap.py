"""Rows swapped with the rank as far from the other end, on forked gloo ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks.ranks import run_ranks
from merakc.kernels.ring.pieces import halves, pieces
from merakc.kernels.ring.swap import start_swap, swap
from tests.kernels.bound import bind

ROWS = (4, 3, 3)
STAY, GO = halves(ROWS)


def _whole(dtype: torch.dtype = torch.float64) -> Tensor:
    """[2, rows, width]."""
    values = torch.randn(2, sum(ROWS), 3, generator=torch.Generator().manual_seed(0))
    return (10 * values).to(dtype)


def _there_and_back(dtype: torch.dtype) -> list[Tensor]:
    rank = bind("cp")
    own = _whole(dtype).split_with_sizes(ROWS, 1)[rank]
    swapped = swap(own, "cp", 1, STAY, GO, rank)
    back = start_swap(swapped, "cp", 1, STAY, GO[::-1], rank).wait()
    return [swapped, back]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.bool])
def test_rows_go_to_the_other_end_and_come_back(dtype: torch.dtype) -> None:
    whole = _whole(dtype)
    for rank, (swapped, back) in enumerate(run_ranks(3, _there_and_back, dtype)):
        own = pieces(ROWS, rank, swapped=True)
        wanted = torch.cat([whole[:, p.start : p.start + p.rows] for p in own], 1)
        assert torch.equal(swapped, wanted)
        assert torch.equal(back, whole.split_with_sizes(ROWS, 1)[rank])


def _gradient() -> Tensor:
    rank = bind("cp")
    own = _whole().split_with_sizes(ROWS, 1)[rank].requires_grad_()
    swapped = swap(own, "cp", 1, STAY, GO, rank)
    places = [k for p in pieces(ROWS, rank, swapped=True) for k in range(p.start, p.start + p.rows)]
    (swapped * torch.tensor(places)[:, None]).sum().backward()
    assert own.grad is not None
    return own.grad


def test_gradients_come_back() -> None:
    places = torch.arange(sum(ROWS), dtype=torch.float64)[:, None].expand(2, -1, 3)
    for rank, gradient in enumerate(run_ranks(3, _gradient)):
        assert torch.equal(gradient, places.split_with_sizes(ROWS, 1)[rank])


def _opcheck() -> None:
    rank = bind("cp")
    x = torch.randn(2, 4, 3).requires_grad_()
    torch.library.opcheck(torch.ops.merakc.swap.default, (x, "cp", 1, (2,), (2,), rank))


def test_opcheck() -> None:
    run_ranks(1, _opcheck)
