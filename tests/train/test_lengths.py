"""Data-parallel ranks whose batches differ in more than the number of samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import merakc
from benchmarks.ranks import run_ranks
from merakc.errors import MismatchError
from merakc.machines.cluster import NOMINAL_CPU

SIZES, LENGTHS, IGNORED = (5, 3), (7, 6), -100
Loss = Callable[[Tensor, dict[str, Any]], Tensor]


class Tagger(nn.Module):
    """A loss of a layer on texts, beside their positions."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.layer, self.positions, self.loss = nn.Linear(4, 4), nn.Embedding(9, 4), loss

    def forward(self, x: Tensor, positions: Tensor, **rest: Any) -> Tensor:
        """`x` is [samples, length, 4]."""
        return self.loss(self.layer(x) + self.positions(positions), rest)


def made(loss: Loss) -> nn.Module:
    torch.manual_seed(0)
    return Tagger(loss).double()


def batch(rank: int, length: int, flag: bool) -> dict[str, Any]:
    """The texts of a rank, of `LENGTHS` each, padded to `length`."""
    draw = torch.Generator().manual_seed(rank)
    x = torch.randn(SIZES[rank], LENGTHS[rank], 4, generator=draw, dtype=torch.float64)
    y = torch.randint(0, 4, x.shape[:2], generator=draw)
    more = length - LENGTHS[rank]
    return {
        "x": F.pad(x, (0, 0, 0, more)), "y": F.pad(y, (0, more), value=IGNORED),
        "positions": torch.arange(length), "flag": flag,
    }  # fmt: skip


def by_tokens(z: Tensor, rest: dict[str, Any]) -> Tensor:
    return F.cross_entropy(z.flatten(0, 1), rest["y"].flatten())


def step(loss: Loss, lengths: tuple[int, int], flags: tuple[bool, bool]) -> float | str:
    """The loss of a second step, whose lengths and flags are these, or its error."""
    rank = torch.distributed.get_rank()
    model = merakc.auto_parallel(
        made(loss), batch(rank, 8, flag=True), dp=2, micro_batches=1, cluster=NOMINAL_CPU
    )
    try:
        found: float = model(**batch(rank, lengths[rank], flags[rank])).item()
    except MismatchError as error:
        return str(error)
    return found


REFUSED: dict[str, tuple[Loss, tuple[int, int], str]] = {
    "mean": (lambda z, rest: z.square().mean(), LENGTHS, "aten.div.Tensor"),
    "numel": (lambda z, rest: z.square().sum() / z.numel(), LENGTHS, "aten.div.Tensor"),
    "rows": (lambda z, rest: z.flatten().topk(5).values.sum(), LENGTHS, "share."),
    "flag": (lambda z, rest: z.sum() * (2 if rest["flag"] else 3), (8, 8), "aten.mul.Tensor"),
}


def steps() -> tuple[float | str, dict[str, float | str]]:
    """The loss of one that is the same computation, and what is said of others."""
    found = step(by_tokens, LENGTHS, (True, True))
    return found, {n: step(loss, own, (True, False)) for n, (loss, own, _) in REFUSED.items()}


def test_lengths_that_no_number_depends_on_and_others_are_refused() -> None:
    """The mean over valid tokens is that of one batch, padded alike."""
    parts = [batch(rank, 7, flag=True) for rank in range(2)]
    whole = {n: torch.cat([p[n] for p in parts]) for n in ("x", "y")}
    wanted = made(by_tokens)(**whole, positions=torch.arange(7)).item()
    for found, refused in run_ranks(2, steps):
        assert found == pytest.approx(wanted, rel=1e-12)
        for name, (_, _, told) in REFUSED.items():
            text = refused[name]
            assert isinstance(text, str), name
            assert "ranks 0 and 1 differ in more than the number of samples" in text
            assert told in text, name
            assert "test_lengths.py" in text
