"""What the ranks of a machine take together and apart."""

from __future__ import annotations

import os

import pytest

from benchmarks.ranks import run_ranks
from merakc.cluster import Sharing
from merakc.ir.program import ActionKind
from merakc.trials import Rank, measure_around, measure_computes, sharing_of, turns_of
from tests.battery.small_models import Words, parallel, words


def ranks(parties: list[tuple[int, int]], cores: int = 2, machines: str = "aaaaaaaa") -> list[Rank]:
    return [Rank(m, cores, party, 1.0) for m, party in zip(machines, parties, strict=False)]


def test_parties_of_a_machine_take_turns() -> None:
    assert turns_of(ranks([(0, 0), (0, 0), (1, 0), (1, 0)])) == [0, 0, 1, 1]
    assert turns_of(ranks([(0, 0), (0, 1), (1, 0), (1, 1)])) == [0, 1, 2, 3]


def test_a_party_of_two_machines_has_one_turn() -> None:
    found = turns_of(ranks([(0, 0), (1, 0), (1, 0), (2, 0)], machines="aabb"))
    assert found == [0, 1, 1, 0]
    assert turns_of(ranks([(0, 0), (1, 0)], machines="ab")) == [0, 0]


@pytest.mark.parametrize(
    ("parties", "cores"),
    [([(0, 0), (1, 0)], 2), ([(0, 0), (0, 1), (1, 0), (1, 1)], 2),
     ([(0, 0), (0, 0), (1, 0), (1, 0)], 4), ([(k, 0) for k in range(4)], 4)],
)  # fmt: skip
def test_speeds_are_those_that_were_measured(parties: list[tuple[int, int]], cores: int) -> None:
    found = ranks(parties, cores)
    party, devices = parties.count(parties[0]), len(parties)
    true = Sharing(tuple(1 - 0.1 * k for k in range(min(cores, devices))), devices)
    measured = sharing_of(found, true.speed(devices) / true.speed(party))
    assert measured.devices == devices
    assert measured.together == pytest.approx(true.together)


def test_those_who_always_compute_at_once_are_not_slowed_down() -> None:
    assert sharing_of(ranks([(0, 0), (0, 0)]), 1.0) == Sharing((1.0, 1.0), 2)
    assert sharing_of(ranks([(0, 0)] * 4), 1.0) == Sharing((1.0, 1.0), 4)


def test_parties_that_fill_the_cores_leave_each_other_the_time_of_their_collectives() -> None:
    found = sharing_of(ranks([(0, 0)] * 2 + [(1, 0)] * 2), 0.6)
    assert [found.speed(k) for k in (1, 2, 3, 4)] == pytest.approx([1, 1, 0.75, 0.6])


def test_noise_makes_no_rank_faster_beside_others() -> None:
    assert sharing_of(ranks([(0, 0), (1, 0)]), 1.3).together == (1.0, 1.0)


def measured(plan: dict[str, int]) -> tuple[dict[ActionKind, float], Sharing | None]:
    steps = parallel(Words, words(0), **plan)._own("_steps")
    seconds, sharing = measure_computes(steps, next(iter(steps.compiled.values())))
    assert seconds is not None
    (own,) = seconds.values()
    return dict(own), sharing


@pytest.mark.parametrize("plan", [{"pp": 2}, {"tp": 2}, {"dp": 2}])
def test_all_ranks_know_what_they_share(plan: dict[str, int]) -> None:
    (first, sharing), (second, other) = run_ranks(2, measured, plan)
    assert sharing is not None
    assert sharing == other
    assert (sharing.devices, sharing.cores) == (2, min(2, len(os.sched_getaffinity(0))))
    for own in (first, second):
        assert own.keys() >= {ActionKind.FORWARD}
        assert all(0 < seconds < 60 for seconds in own.values())


def test_one_rank_shares_nothing() -> None:
    seconds, sharing = measured({})
    assert sharing is None
    assert seconds.keys() == {ActionKind.FORWARD, ActionKind.BACKWARD}


def around(plan: dict[str, int]) -> float:
    steps = parallel(Words, words(0), **plan)._own("_steps")
    return measure_around(steps, next(iter(steps.compiled.values())))


@pytest.mark.parametrize("plan", [{"pp": 2}, {"dp": 2}])
def test_all_ranks_know_what_a_step_does_around_its_program(plan: dict[str, int]) -> None:
    first, second = run_ranks(2, around, plan)
    assert 0 < first == second < 60
