"""Products by oneDNN: of operands in any layout, added to totals, chosen where they are faster."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from merakc.equality.casts import lifted_casts
from merakc.kernels import gemm
from tests.passes.lockstep import relative_error

M, K, N = 130, 70, 30


def layouts(rows: int, columns: int) -> Iterator[Tensor]:
    """Matrices of one shape: dense, turned, with gaps, shifted, and with rows or columns alike."""
    torch.manual_seed(0)
    yield torch.randn(rows, columns)
    yield torch.randn(columns, rows).t()
    yield torch.randn(rows, 2 * columns)[:, ::2]
    yield torch.randn(2 * rows, columns)[::2]
    yield torch.randn(rows, columns + 5)[:, 3:-2]
    yield torch.randn(rows * columns + 1)[1:].view(rows, columns)
    yield torch.randn(1, columns).expand(rows, columns)
    yield torch.randn(rows, 1).expand(rows, columns)


def test_operands_may_have_any_layout() -> None:
    for left in layouts(M, K):
        for right in layouts(K, N):
            out = gemm.mm(left, right)
            assert relative_error(out, left.double() @ right.double()) < 1e-6
            assert out.is_contiguous()


@pytest.mark.parametrize("bias", [torch.randn(N), torch.ones(1).expand(N), torch.randn(2 * N)[::2]])
def test_a_bias_may_have_any_layout(bias: Tensor) -> None:
    left, right = torch.randn(M, K), torch.randn(K, N)
    wanted = bias.double() + left.double() @ right.double()
    assert relative_error(gemm.addmm(bias, left, right), wanted) < 1e-6
    cube = gemm.linear(left.view(2, 5, -1, K), right.t(), bias)
    assert relative_error(cube, wanted.view(2, 5, -1, N)) < 1e-6


@pytest.mark.parametrize("rows_at_once", [M, 7, 1])
def test_it_is_added_in_blocks(rows_at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "BLOCK_BYTES", rows_at_once * N * 4)
    left, right, total = torch.randn(K, M).t(), torch.randn(K, N), torch.randn(M, N)
    product = left.double() @ right.double()
    wanted = total.double() + product
    assert gemm.add_mm(total, True, left, right) is total
    assert relative_error(total, wanted) < 1e-6
    assert relative_error(gemm.add_mm(total, False, left, right), product) < 1e-6


def test_the_ops_are_these_functions() -> None:
    bias, left, right = torch.randn(N), torch.randn(M, K), torch.randn(K, N)
    assert torch.equal(torch.ops.merakc.mm(left, right), gemm.mm(left, right))
    assert torch.equal(torch.ops.merakc.addmm(bias, left, right), gemm.addmm(bias, left, right))
    assert torch.equal(torch.ops.merakc.linear(left, right.t()), gemm.linear(left, right.t()))
    with FakeTensorMode():
        assert torch.ops.merakc.linear(torch.empty(3, M, K), torch.empty(N, K)).shape == (3, M, N)
        out = torch.ops.merakc.addmm(torch.empty(N), torch.empty(M, K), torch.empty(K, N))
        assert out.shape == (M, N)


def test_it_is_measured_in_whatever_mode_a_user_is() -> None:
    gemm.gain.cache_clear()
    with lifted_casts():
        assert gemm.gain() > 0


def test_it_is_used_where_it_is_clearly_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gemm.gain() > 0
    for gain, faster in ((2.0, True), (1.1, False)):
        monkeypatch.setattr(gemm, "gain", lambda gain=gain: gain)
        assert gemm.is_faster() is faster
    monkeypatch.setattr(gemm, "gain", lambda: 2.0)
    with torch.backends.mkldnn.flags(enabled=False, allow_tf32=None):
        assert not gemm.is_faster()
