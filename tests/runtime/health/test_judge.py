"""The judge with a clock that is set by hand."""

from __future__ import annotations

import pytest

from merakc.runtime.health.facts import ALL, State, Status
from merakc.runtime.health.judge import ASK_S, FAILS_ALIKE_S, GRACE_S, Judge

TIMEOUT_S = 20.0
TRAIN = "model(...)"


class Job:
    def __init__(self, world: int = 3) -> None:
        self.now = 100.0
        self.judge = Judge(world, TIMEOUT_S, lambda: self.now)
        self.at: dict[int, Status] = {}

    def say(self, rank: int, call: int, name: str = TRAIN, state: State = State.IN,
            asks: tuple[str, ...] = (), text: str = "", **facts: str) -> None:  # fmt: skip
        status = Status(call, name, facts or {ALL: name}, state, text=text, asks=asks)
        self.at[rank] = status
        self.judge.hear(rank, status)

    def wait(self, seconds: float, *silent: int) -> None:
        """Time passes, in which all ranks beat but some."""
        end = self.now + seconds
        while self.now < end:
            self.now += 0.5
            for rank, status in self.at.items():
                if rank not in silent:
                    self.judge.hear(rank, status)
            self.judge.look()

    @property
    def fault(self) -> str:
        return self.judge.fault.text if self.judge.fault else ""

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.judge.fault.ranks if self.judge.fault else ()

    def answers(self) -> list[tuple[int, dict[str, object]]]:
        found, self.judge.out = self.judge.out, []
        return found


@pytest.fixture
def job() -> Job:
    made = Job()
    for rank in range(3):
        made.say(rank, 7)
    return made


def test_nothing_is_wrong_with_ranks_that_are_in_one_call(job: Job) -> None:
    job.wait(3 * TIMEOUT_S)
    assert not job.fault


def test_a_closed_connection_is_a_lost_rank(job: Job) -> None:
    job.judge.gone(1)
    assert job.ranks == (1,)
    assert "rank 1 was lost" in job.fault
    assert "call 7, model(...)" in job.fault


def test_a_rank_that_said_which_error_ends_it(job: Job) -> None:
    job.judge.seen[1].text = "ValueError: mine"
    job.judge.gone(1)
    assert job.fault == "rank 1 ended with ValueError: mine"


def test_a_rank_may_leave_while_nobody_needs_it(job: Job) -> None:
    job.say(0, 7, state=State.OUT)
    job.judge.end(1, Status(7, TRAIN, {ALL: TRAIN}, State.OUT), "")
    job.judge.gone(1)
    job.wait(3 * TIMEOUT_S)
    assert not job.fault
    job.say(2, 8)
    job.wait(1.0)
    assert job.ranks == (1,)
    assert "rank 1 has ended" in job.fault
    assert "rank 2 is in call 8" in job.fault


def test_beats_that_stay_away(job: Job) -> None:
    job.wait(TIMEOUT_S, 2)
    assert not job.fault
    job.wait(1.0, 2)
    assert job.ranks == (2,)
    assert "has not been heard of for 2" in job.fault


def test_who_stood_still_itself_blames_nobody(job: Job) -> None:
    job.now += 3600
    job.judge.paused()
    job.judge.look()
    assert not job.fault


def test_a_broken_wait_is_laid_to_the_silent_rank(job: Job) -> None:
    job.wait(3.0, 2)
    job.say(0, 7, state=State.BROKEN, text="timed out")
    assert job.ranks == (2,)


def test_a_broken_wait_is_laid_to_the_rank_that_did_not_come(job: Job) -> None:
    job.say(0, 8)
    job.say(1, 8)
    job.say(2, 7, state=State.OUT)
    job.wait(TIMEOUT_S)
    job.say(0, 8, state=State.BROKEN, text="timed out")
    assert not job.fault  # a connection may have been closed: that news comes first
    job.wait(GRACE_S)
    assert job.fault.startswith("rank 2 did not come to call 8, model(...), where rank 0 waits")


def test_a_broken_wait_where_all_are_well_says_where_they_are(job: Job) -> None:
    job.say(0, 7, state=State.BROKEN, text="timed out")
    job.wait(GRACE_S)
    assert job.ranks == (0,)
    assert "no rank is lost" in job.fault
    assert "rank 1 is in call 7" in job.fault


def test_a_failure_in_a_call_is_waited_for_on_the_others(job: Job) -> None:
    job.say(1, 7, state=State.FAILED, text="ConfigError: no")
    job.wait(FAILS_ALIKE_S / 2)
    for rank in (0, 2):
        job.say(rank, 7, state=State.FAILED, text="ConfigError: no")
    job.wait(3 * FAILS_ALIKE_S)
    assert not job.fault


def test_a_failure_on_one_rank_alone(job: Job) -> None:
    job.say(1, 7, state=State.FAILED, text="MemoryError")
    job.wait(FAILS_ALIKE_S + 1.0)
    assert job.fault == "rank 1 failed in call 7, model(...): MemoryError"


def test_a_failure_of_a_rank_that_goes_is_told_at_once(job: Job) -> None:
    job.say(1, 7, state=State.FAILED, text="MemoryError")
    job.judge.end(1, job.at[1], "MemoryError")
    assert "rank 1 failed in call 7, model(...): MemoryError" in job.fault


def test_all_ranks_agree(job: Job) -> None:
    for rank in range(3):
        job.say(rank, 8, "eval", asks=(ALL,))
    assert job.answers() == [(r, {"agreed": 8}) for r in range(3)]
    assert not job.judge.asked


def test_a_rank_that_asks_nothing_is_asked(job: Job) -> None:
    job.say(0, 8, "eval", asks=(ALL,))
    job.say(1, 8, "eval")
    assert job.judge.due_s() == pytest.approx(ASK_S)
    job.now += 2 * ASK_S
    job.judge.look()
    assert job.answers() == [(2, {"pending": 8})]
    assert job.judge.due_s() == float("inf")
    job.say(2, 8, "eval")
    assert job.answers() == [(0, {"agreed": 8})]


def test_what_a_rank_did_before_is_compared_and_is_not_where_it_is(job: Job) -> None:
    job.say(2, 9, "step")
    job.say(0, 8, "eval", asks=(ALL,))
    job.say(1, 8, "eval")
    job.now += 2 * ASK_S
    job.judge.look()
    assert job.answers() == [(2, {"pending": 8})]
    job.judge.hear(2, Status(8, TRAIN, {ALL: TRAIN}, State.IN))
    assert job.judge.seen[2].status.call == 9
    assert job.ranks == (2,)
    assert job.fault.endswith("rank 2 is in model(...); the others in eval")


def test_a_rank_that_is_elsewhere_is_a_mismatch_at_once(job: Job) -> None:
    job.say(0, 8, "full_state_dict", asks=(ALL,))
    job.say(1, 8)
    assert job.judge.fault is not None
    assert job.judge.fault.mismatch
    assert job.ranks == (0,)
    assert job.fault == (
        "rank 0 went another way at call 8: rank 0 is in full_state_dict; the others in model(...)"
    )


def test_where_ranks_differ_nobody_is_told_to_go_on(job: Job) -> None:
    job.say(0, 8, "full_state_dict", asks=(ALL,))
    job.say(1, 8, "full_state_dict")
    assert not job.answers()
    job.say(2, 8)
    assert job.judge.fault is not None
    assert not job.answers()


def test_of_two_that_both_ask_none_is_the_odd_one() -> None:
    job = Job(2)
    job.say(0, 1, "save", asks=(ALL,))
    job.say(1, 1, "load", asks=(ALL,))
    assert job.ranks == (0, 1)
    assert job.fault.endswith("rank 0 is in save; rank 1 is in load")


def test_of_several_the_odd_one_is_named(job: Job) -> None:
    job.judge.said[8] = {ALL: {0: TRAIN, 1: TRAIN}}
    job.say(2, 8, "eval")
    assert job.ranks == (2,)
    assert job.fault.endswith("rank 2 is in eval; the others in model(...)")


def test_ranks_agree_within_their_scope_alone() -> None:
    job = Job(4)
    for rank in (0, 1):
        job.say(rank, 1, asks=("0,1",), **{ALL: TRAIN, "0,1": "8 rows"})
    assert [rank for rank, _ in job.answers()] == [0, 1]
    for rank in (2, 3):
        job.say(rank, 1, asks=("2,3",), **{ALL: TRAIN, "2,3": "6 rows"})
    assert [rank for rank, _ in job.answers()] == [2, 3]
    assert not job.fault


def test_who_does_not_come_is_named_after_the_time(job: Job) -> None:
    job.say(0, 8, "save", asks=(ALL,))
    job.say(1, 8, "save")
    job.say(2, 7, state=State.OUT)
    job.wait(TIMEOUT_S + 1.0)
    assert job.fault.startswith("rank 2 did not come to call 8, save, where rank 0 waits")
    assert "rank 2 is outside any call, after call 7" in job.fault


def test_old_calls_are_forgotten(job: Job) -> None:
    for call in range(8, 500):
        for rank in range(3):
            job.say(rank, call)
    assert len(job.judge.said) < 80
