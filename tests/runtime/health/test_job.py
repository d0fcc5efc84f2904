"""Jobs of real ranks, with collectives in place of steps."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.ranks import run_ranks
from merakc.errors import ConfigError, MerakWarning, MismatchError, StuckError
from merakc.runtime.health import job as jobs
from merakc.runtime.health import meeting
from merakc.runtime.health.facts import ALL
from merakc.runtime.health.job import all_ranks, call, job, new_group, start_job

TIMEOUT_S = 2.5  # of a rank that is silent
LONG_S = 60.0  # where something is to be seen long before
Told = tuple[str, str, float]
FORK = multiprocessing.get_context("fork")
# Released by a rank that has seen what it was to see, for one that waits for it.
SEEN = FORK.Semaphore(0)


@pytest.fixture(autouse=True)
def unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "SEEN", FORK.Semaphore(0))


def step(name: str = "step", facts: dict[str, str] | None = None) -> None:
    with call(name, facts, prompt=False):
        dist.all_reduce(torch.ones(2), group=all_ranks())


def wait_for(others: int = 1) -> None:
    for _ in range(others):
        assert SEEN.acquire(timeout=LONG_S)


def watched(
    fault: Callable[[], None], ranks: tuple[int, ...] = (1,), timeout_s: float = LONG_S
) -> Told:
    """Steps, until a fault of these ranks; what the others raise, and how long after."""
    start_job(timeout_s)
    for _ in range(12):
        step()
    start_s = time.monotonic()
    try:
        if dist.get_rank() in ranks:
            fault()
        for _ in range(3):
            step()
    except (StuckError, MismatchError) as error:
        SEEN.release()
        return type(error).__name__, str(error), time.monotonic() - start_s
    return "nothing", "", 0.0


def test_a_stopped_rank_is_named_by_all() -> None:
    def stop() -> None:
        process.value = os.getpid()
        os.kill(os.getpid(), signal.SIGSTOP)
        raise MismatchError("it went on")

    def run() -> Told:
        told = watched(stop, timeout_s=TIMEOUT_S)
        if dist.get_rank() == 0:
            wait_for(2)
            os.kill(process.value, signal.SIGCONT)
        return told

    process = FORK.Value("i", 0)
    for kind, text, seconds in run_ranks(3, run)[::2]:
        assert kind == "StuckError"
        assert text.startswith("rank 1 has not been heard of for")
        assert "step" in text
        assert TIMEOUT_S - 0.5 < seconds < LONG_S


def test_a_rank_that_leaves_is_named_within_a_beat() -> None:
    def leave() -> None:
        found = job()
        assert found is not None
        found.close()
        wait_for(2)

    found = run_ranks(3, watched, leave)
    for kind, text, seconds in (found[0], found[2]):
        assert kind == "StuckError"
        assert text.startswith("rank 1 has ended, outside any call, after call 12, step")
        assert seconds < LONG_S / 2


def test_a_rank_that_goes_another_way() -> None:
    found = run_ranks(3, watched, lambda: step("full_state_dict"))
    for kind, text, seconds in found:
        assert kind == "MismatchError"
        assert text.startswith("rank 1 went another way at call 13")
        assert "rank 1 is in full_state_dict; the others in step" in text
        assert seconds < LONG_S / 2


def test_a_rank_that_ran_ahead_is_held_to_the_calls_behind_it() -> None:
    """As a first stage is that only sends: its collectives would fit those of another call."""

    def forget() -> str:
        start_job(LONG_S)
        try:
            for k in range(12):
                if k < 11 or dist.get_rank() == 0:
                    with call("send"):
                        pass
                step()
        except MismatchError as error:
            return str(error)
        return ""

    for text in run_ranks(2, forget):
        assert text.startswith("rank 1 went another way at call 23: rank 1 is in step")
        assert "the others in send" in text


def test_other_facts_of_one_scope() -> None:
    def facts() -> str:
        start_job(TIMEOUT_S)
        rank = dist.get_rank()
        scope = "0,1" if rank < 2 else "2,3"
        try:
            for k in range(4):
                step("step", {ALL: "step", scope: f"{rank // 2} {k}"})
            step("step", {ALL: "step", scope: f"{rank if rank == 3 else 2}"})
        except MismatchError as error:
            return str(error)
        return ""

    assert all("rank 3 is in 3" in text for text in run_ranks(4, facts))


def test_a_failure_of_one_rank_is_told_to_the_others() -> None:
    def run() -> str:
        start_job(TIMEOUT_S)
        rank = dist.get_rank()
        try:
            with call("step"):
                if rank == 1:
                    raise MemoryError("none left")
                dist.all_reduce(torch.ones(1), group=all_ranks())
        except (StuckError, MemoryError) as error:
            return str(error)
        return ""

    first, second, third = run_ranks(3, run)
    assert second == "none left"
    for text in (first, third):
        assert text.startswith("rank 1 failed in call 1, step: MemoryError: none left")


def test_mistakes_that_all_make_leave_the_job_as_it_was() -> None:
    def run() -> None:
        start_job(TIMEOUT_S)
        for _ in range(3):
            with pytest.raises(ValueError, match="no"), call("step"):
                raise ValueError("no")
        step()

    run_ranks(2, run)


def test_a_mistake_that_all_make_is_the_own_one_on_all() -> None:
    """Also where another rank has ended with it before."""

    def run() -> str:
        start_job(LONG_S)
        found = job()
        assert found is not None
        assert found.channel is not None
        try:
            with call("step"):
                if dist.get_rank() == 0:
                    SEEN.release()
                    while found.fault is None:
                        time.sleep(0.01)
                else:
                    wait_for()
                raise ConfigError("of all")
        except ConfigError as error:
            if dist.get_rank() == 1:
                found.channel.say_dying(f"ConfigError: {error}")
                found.close()
            return str(error)

    assert run_ranks(2, run) == ["of all"] * 2


def test_who_does_not_come_is_named_and_waited_for_aloud(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "NOTICE_S", 0.5)

    def run() -> str:
        start_job(TIMEOUT_S)
        if dist.get_rank() == 1:
            wait_for()
            return ""
        with (
            pytest.warns(MerakWarning, match="which every rank must call"),
            pytest.raises(StuckError) as caught,
            call("save"),
        ):
            pass
        SEEN.release()
        return str(caught.value)

    text = run_ranks(2, run)[0]
    assert text.startswith("rank 1 did not come to call 1, save, where rank 0 waits")


@pytest.mark.filterwarnings("error")
def test_a_wait_that_is_broken_off_leaves_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "NOTICE_S", 0.2)

    def run() -> jobs.State:
        start_job(TIMEOUT_S)
        if dist.get_rank() == 1:
            wait_for()
        else:
            with pytest.raises(MerakWarning), call("save"):  # warnings are errors here
                pass
            SEEN.release()
        found = job()
        assert found is not None
        return found.here.state

    assert run_ranks(2, run)[0] is jobs.State.FAILED


def test_a_rank_that_never_joins_is_named() -> None:
    def run() -> str:
        if dist.get_rank() == 1:
            wait_for(2)
            return ""
        with pytest.raises(StuckError) as caught:
            start_job(1.0)
        SEEN.release()
        return str(caught.value)

    assert run_ranks(3, run)[0].startswith("rank 1 did not come to auto_parallel")


def test_calls_inside_calls_and_of_other_threads_are_not_counted() -> None:
    def run() -> int:
        start_job(TIMEOUT_S)
        found = job()
        assert found is not None
        with call("outer"), call(f"inner {dist.get_rank()}"):
            pass
        thread = threading.Thread(target=lambda: call(f"{dist.get_rank()}").__enter__())
        thread.start()
        thread.join()
        return found.here.call

    assert run_ranks(2, run) == [1, 1]


def health_threads() -> int:
    return sum(t.name == "merakc-health" for t in threading.enumerate())


def test_no_thread_outlives_the_process_group() -> None:
    def run() -> tuple[int, int, int]:
        start_job(TIMEOUT_S)
        start_job(2 * TIMEOUT_S)  # of a second model
        step()
        during = health_threads()
        dist.destroy_process_group()
        gc.collect()
        end_s = time.monotonic() + LONG_S
        while health_threads() and time.monotonic() < end_s:
            time.sleep(0.05)
        return during, health_threads(), jobs.job() is None

    assert run_ranks(2, run) == [(1, 0, True)] * 2


def test_one_rank_has_no_job() -> None:
    start_job(TIMEOUT_S)
    assert job() is None
    assert all_ranks() is None
    with call("step"):
        pass


def test_a_group_has_the_timeout_that_was_asked_for() -> None:
    def run() -> float:
        group = new_group([0, 1], 1.0)
        if dist.get_rank() == 1:
            wait_for()
            return 0.0
        start_s = time.monotonic()
        with pytest.raises(RuntimeError):
            dist.all_reduce(torch.ones(1), group=group)
        SEEN.release()
        return time.monotonic() - start_s

    assert 0.8 < run_ranks(2, run)[0] < LONG_S / 2


def test_an_uncaught_exception_is_told_before_the_process_ends() -> None:
    def die() -> None:
        try:
            raise ValueError("mine")
        except ValueError as error:
            sys.stderr = open(os.devnull, "w")  # noqa: SIM115
            sys.excepthook(ValueError, error, error.__traceback__)
        found: Any = job()
        found.close()
        wait_for(2)

    for kind, text, _ in run_ranks(3, watched, die)[::2]:
        assert kind == "StuckError"
        assert text.startswith("rank 1 ended with ValueError: mine")


def test_without_a_channel_waits_still_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "connect", lambda *_: None)

    def run() -> str:
        if dist.get_rank() == 0:
            with pytest.warns(MerakWarning, match="does not reach rank 0"):
                start_job(TIMEOUT_S)
        else:
            start_job(TIMEOUT_S)
        group = new_group([0, 1], 1.0)
        if dist.get_rank() == 1:
            wait_for()
            return ""
        with pytest.raises(StuckError) as caught, call("step"):
            dist.all_reduce(torch.ones(1), group=group)
        SEEN.release()
        return str(caught.value)

    assert run_ranks(2, run)[0].startswith("a rank was lost, or is stuck: RuntimeError")
