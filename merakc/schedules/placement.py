"""Which rank runs which stage, and the costs of stages that are cut into chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Literal

from merakc.ir.costs import StageCost

Placement = Literal["plain", "interleaved", "v"]


def place(placement: Placement, ranks: int, chunks: int = 1) -> tuple[int, ...]:
    """The rank of each stage, for `chunks` stages a rank.

    Interleaved stages go round the ranks in a loop (Narayanan et al. 2021, section 2.2.2); V ones
    turn back at either end, so that the first stage and, with an even number of chunks, the last
    are on rank 0 (Qi et al. 2024, "Pipeline Parallelism with Controllable Memory", section 4).
    """
    assert ranks >= 1, ranks
    assert chunks >= 1, chunks
    assert placement != "plain" or chunks == 1, f"plain placement has one chunk, not {chunks}"
    there = list(range(ranks))
    back = there[::-1] if placement == "v" else there
    return tuple(r for k in range(chunks) for r in (back if k % 2 else there))


def split_stages(costs: Sequence[StageCost], chunks: int) -> tuple[StageCost, ...]:
    """The costs of the same model in `chunks` times as many stages, each stage cut evenly."""
    assert chunks >= 1, chunks
    if chunks == 1:
        return tuple(costs)
    return tuple(_part(cost, chunks) for cost in costs for _ in range(chunks))


def _part(cost: StageCost, chunks: int) -> StageCost:
    """One of so many equal parts; bytes are rounded up."""
    return StageCost(
        **{
            name: -(-figure // chunks) if name.endswith("_bytes") else figure / chunks
            for name, figure in asdict(cost).items()
        }
    )
