"""Triton's passes over scores: who takes them, and which blocks they are given.

What they compute is compared in Triton's interpreter, by tests/benchmarks/gpu_path/test_kernels.py.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from merakc.kernels import scores


class InPlace(ModuleType):
    """The same passes in plain ops, and the blocks that they were given."""

    def __init__(self) -> None:
        super().__init__("merakc.kernels.triton_scores")
        self.blocks: list[tuple[int, int]] = []

    def add_block(self, part: Tensor, labels: Tensor, total: Tensor, picked: Tensor,
                  first: int) -> None:  # fmt: skip
        self.blocks.append((first, part.shape[1]))
        total.copy_(torch.logaddexp(total, part.float().logsumexp(1)))
        place = labels - first
        here = (place >= 0) & (place < part.shape[1])
        own = part.float().gather(1, place.clamp(0, part.shape[1] - 1)[:, None])[:, 0]
        picked.add_(own * here)

    def to_gradients(self, part: Tensor, read: Sequence[Tensor], first: int) -> None:
        labels, total, of_total, of_picked = read
        own = torch.arange(first, first + part.shape[1]) == labels[:, None]
        made = (part.float() - total[:, None]).exp() * of_total[:, None] + own * of_picked[:, None]
        part.copy_(made)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_of_both_forms_give_the_same(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    n, c = 6, 50
    monkeypatch.setattr(scores, "BLOCK_BYTES", n * 4 * 10)
    x, w = torch.randn(n, 8).to(dtype), torch.randn(c, 8).to(dtype)
    labels = torch.tensor([0, 9, 10, 49, -100, 30])
    given = torch.randn(n), torch.randn(n)

    def both() -> list[Tensor]:
        made = scores.scores(x, w, None, labels, 0, c, -100, False)
        last = 0, False, True, True, False
        return [*made, *scores.scores_backward(*given, x, w, None, labels, made[0], *last)[:2]]

    wanted = both()
    passes = InPlace()
    monkeypatch.setitem(sys.modules, passes.__name__, passes)
    monkeypatch.setattr("merakc.kernels.triton_scores", passes, raising=False)
    monkeypatch.setattr(scores, "_is_fused", lambda _: True)
    found = both()
    wide = 10 if dtype is torch.float32 else 30  # no float32 copy of a block is there
    assert passes.blocks == [(k, min(wide, c - k)) for k in range(0, c, wide)]
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2 if dtype != torch.float32 else 1e-5,
                                   atol=2e-2 if dtype != torch.float32 else 1e-5)  # fmt: skip


def test_a_cpu_takes_the_plain_form() -> None:
    assert not scores._is_fused(torch.zeros(1))
    like_a_gpus: Any = type("X", (), {"is_cuda": True, "dtype": torch.float64})
    assert not scores._is_fused(like_a_gpus)
