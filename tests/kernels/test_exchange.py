"""Parts of one dim for parts of another, on forked gloo ranks: values, gradients, sizes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks.ranks import run_ranks
from merakc.kernels.exchange import exchange, start_exchange
from tests.kernels.bound import bind

ROWS, HEADS = (2, 0, 3), (1, 3, 2)  # one a rank


def _whole(dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    """[heads, rows, width]."""
    values = torch.randn(sum(HEADS), sum(ROWS), 2, generator=torch.Generator().manual_seed(seed))
    return (10 * values).to(dtype)


def _of_rows(whole: Tensor, rank: int) -> Tensor:
    return whole.split_with_sizes(ROWS, 1)[rank]


def _of_heads(whole: Tensor, rank: int) -> Tensor:
    return whole.split_with_sizes(HEADS, 0)[rank]


def _there_and_back(dtype: torch.dtype) -> list[Tensor]:
    rank = bind("cp")
    rows = _of_rows(_whole(dtype), rank)
    heads = exchange(rows, "cp", (1, 0), ROWS, HEADS, rank)
    back = start_exchange(heads, "cp", (0, 1), HEADS, ROWS, rank).wait()
    assert heads.is_contiguous()
    return [heads, back]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.bool])
def test_a_rank_has_all_rows_of_its_heads(dtype: torch.dtype) -> None:
    for rank, (heads, back) in enumerate(run_ranks(3, _there_and_back, dtype)):
        assert torch.equal(heads, _of_heads(_whole(dtype), rank))
        assert torch.equal(back, _of_rows(_whole(dtype), rank))


def _gradient() -> Tensor:
    rank = bind("cp")
    rows = _of_rows(_whole(), rank).requires_grad_()
    heads = exchange(rows, "cp", (1, 0), ROWS, HEADS, rank)
    (heads * _of_heads(_whole(seed=1), rank)).sum().backward()
    assert rows.grad is not None
    return rows.grad


def test_gradients_travel_back() -> None:
    for rank, gradient in enumerate(run_ranks(3, _gradient)):
        assert torch.equal(gradient, _of_rows(_whole(seed=1), rank))


def _opcheck() -> None:
    rank = bind("cp")
    x = _whole()[:, :3].transpose(0, 1).requires_grad_()
    args = ("cp", (0, 1), (3,), (6,), rank)
    torch.library.opcheck(torch.ops.merakc.exchange.default, (x, *args))
    assert torch.autograd.gradcheck(lambda x: exchange(x, *args), (x,))


def test_opcheck_and_gradcheck() -> None:
    run_ranks(1, _opcheck)
