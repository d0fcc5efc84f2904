"""Which rank runs which stage."""

from __future__ import annotations

from typing import Literal

Placement = Literal["plain", "interleaved", "v"]


def place(placement: Placement, ranks: int, virtual_stages: int = 1) -> tuple[int, ...]:
    """The rank of each stage, for so many virtual stages a rank.

    Interleaved stages go round the ranks in a loop (Narayanan et al. 2021, section 2.2.2); V ones
    turn back at either end, so that the first stage and, with an even number of them, the last
    are on rank 0 (Qi et al. 2024, "Pipeline Parallelism with Controllable Memory", section 4).
    """
    assert ranks >= 1, ranks
    assert virtual_stages >= 1, virtual_stages
    assert placement != "plain" or virtual_stages == 1, (
        f"plain placement has one stage a rank, not {virtual_stages}"
    )
    there = list(range(ranks))
    back = there[::-1] if placement == "v" else there
    return tuple(r for k in range(virtual_stages) for r in (back if k % 2 else there))
