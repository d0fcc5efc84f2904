"""The chosen runs are the fastest of all that fit, by enumeration."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from merakc.ir.recompute import Keep, Run
from merakc.passes.recompute.costs import BlockCost
from merakc.passes.recompute.solve import least_bytes, solve, steps_from

BLOCKS = 5


def chain(seed: int) -> list[BlockCost]:
    draw = random.Random(seed)
    found = []
    for _ in range(BLOCKS):
        entering, saved = draw.randint(1, 9), draw.randint(0, 40)
        forward, backward, begin = (draw.randint(0, 30) for _ in range(3))
        tail = draw.random()
        found.append(
            BlockCost(
                entering, draw.choice([0, entering]), saved, draw.randint(0, saved),
                saved + forward, backward, min(begin, backward), tail + draw.random(), tail,
                draw.random() * 1.5 * tail,
            )
        )  # fmt: skip
    return found


def every(blocks: int) -> Iterator[tuple[Run, ...]]:
    """All ways to cut so many blocks into runs."""
    if not blocks:
        yield ()
    for size in range(1, blocks + 1):
        keeps = Keep if size == 1 else (Keep.AGAIN,)
        yield from ((Run(k, size), *rest) for k in keeps for rest in every(blocks - size))


def priced(costs: list[BlockCost], runs: tuple[Run, ...], others: int) -> tuple[float, float]:
    """The highest point, with others of the same in flight, and the seconds; infinite where a run
    may not be.
    """
    stored = most = 0
    seconds, at = 0.0, 0
    for run in runs:
        step = next((s for s in steps_from(costs, at) if s.run == run), None)
        if step is None:
            return float("inf"), float("inf")
        most = max(most, stored + step.peak_bytes)
        stored += step.stored_bytes
        seconds, at = seconds + step.again_s, at + run.blocks
    return most + others * stored, seconds


@pytest.mark.parametrize("seed", range(12))
def test_no_other_choice_that_fits_is_faster(seed: int) -> None:
    costs = chain(seed)
    prices = [priced(costs, runs, 0) for runs in every(BLOCKS)]
    least = min(peak for peak, _ in prices)
    assert solve(costs, int(least) - 1) is None
    for budget in range(int(least), int(least) + 150, 7):
        found = solve(costs, budget)
        assert found is not None
        peak, seconds = priced(costs, unjoined(found.runs), 0)
        assert (peak, seconds) == (found.peak_bytes, pytest.approx(found.again_s))
        assert peak <= budget
        assert seconds == pytest.approx(min(s for p, s in prices if p <= budget))
    assert least <= least_bytes(costs) <= 1.01 * least + 1


def test_micro_batches_in_flight_share_the_budget() -> None:
    costs = chain(3)
    prices = [priced(costs, runs, 3) for runs in every(BLOCKS)]
    for budget in (120, 200, 300, 400):
        found = solve(costs, budget, in_flight=4)
        best = min((s for p, s in prices if p <= budget), default=None)
        if found is None:
            assert best is None or budget < 1.2 * min(p for p, _ in prices)
        else:
            peak, seconds = priced(costs, unjoined(found.runs), 3)
            assert peak <= budget
            assert best is not None
            assert best <= seconds + 1e-9


def unjoined(runs: tuple[Run, ...]) -> tuple[Run, ...]:
    return tuple(
        one
        for run in runs
        for one in ([Run(run.keep, 1)] * run.blocks if run.keep is Keep.KEPT else [run])
    )
