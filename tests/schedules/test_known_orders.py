"""Known orders as arrays, held against the lists that the schedules are made of."""

from __future__ import annotations

import random

import pytest

from merakc.costs.work.keep import keep_bytes, shared_out
from merakc.errors import ConfigError
from merakc.ir.costs import StageCost
from merakc.schedules.known_orders import known_orders
from merakc.schedules.planned import forwards_first
from merakc.schedules.registry import make_schedule
from merakc.schedules.timing import make_pipeline, peak_bytes
from merakc.schedules.work import encode

CASES = [("1f1b", 1), ("interleaved-1f1b", 2), ("zb-h1", 1), ("zb-v", 2), ("gpipe", 1)]


def random_costs(stages: int, seed: int) -> list[StageCost]:
    pick = random.Random(seed)
    sizes = [[pick.randrange(10**12) for _ in range(9)] for _ in range(stages)]
    return [
        StageCost(
            1.0, 2.0, saved_bytes=a, checkpoint_bytes=b % (a + 1), deferred_bytes=c % (a + 1),
            forward_peak_bytes=d, backward_peak_bytes=e, checkpoint_peak_bytes=f,
            recompute_peak_bytes=g, weight_peak_bytes=h, static_bytes=i,
        )
        for a, b, c, d, e, f, g, h, i in sizes
    ]  # fmt: skip


@pytest.mark.parametrize(("name", "chunks"), CASES)
@pytest.mark.parametrize("again", [(), (1,), (0, 2, 3)])
def test_works_and_peaks_are_those_of_the_schedule(
    name: str, chunks: int, again: tuple[int, ...]
) -> None:
    found = known_orders(name, 4, 8, chunks, again)
    schedule = make_schedule(
        name, 4, 8, recompute=again, virtual_stages=chunks if chunks > 1 else None
    )
    assert found.rank_of == schedule.rank_of
    assert found.works == encode(schedule)
    for seed in range(5):
        costs = random_costs(schedule.stages, seed)
        pipeline = make_pipeline(schedule.rank_of, costs, 8)
        peaks = tuple(peak_bytes(pipeline, r, order) for r, order in enumerate(found.works))
        assert found.peak_bytes(costs) == peaks


@pytest.mark.parametrize(("name", "chunks"), CASES)
def test_what_is_in_flight_shares_the_memory_as_the_schedule_does(name: str, chunks: int) -> None:
    found = known_orders(name, 4, 8, chunks)
    schedule = make_schedule(name, 4, 8, virtual_stages=chunks if chunks > 1 else None)
    costs = random_costs(schedule.stages, 0)
    for capacity in (10**12, 5 * 10**12, 10**13, 10**14):
        own = shared_out(found.rank_of, found.in_flight, costs, [capacity] * 4)
        assert own == keep_bytes(schedule, costs, [capacity] * 4)


@pytest.mark.parametrize(("name", "chunks"), CASES)
@pytest.mark.parametrize("again", [(), (0, 2)])
def test_forwards_come_first_where_a_loss_waits_for_the_batch(
    name: str, chunks: int, again: tuple[int, ...]
) -> None:
    found = known_orders(name, 4, 8, chunks, again, whole_batch=True)
    schedule = make_schedule(
        name, 4, 8, recompute=again, virtual_stages=chunks if chunks > 1 else None
    )
    assert found.works == encode(forwards_first(schedule))
    assert set(found.in_flight) == {8}


def test_they_are_made_once_and_as_a_schedule_is() -> None:
    assert known_orders("1f1b", 4, 8, 1) is known_orders("1f1b", 4, 8, 1)
    with pytest.raises(ConfigError, match="hides recomputation"):
        known_orders("merak", 4, 8, 1)
