from __future__ import annotations

from benchmarks.peers.torch_pipeline import own_stages
from benchmarks.ranks import run_ranks
from tests.benchmarks.peers.comparing import error_of


def _errors() -> float:
    plain = error_of("torch_pipeline", "Schedule1F1B", pp=2, micro_batches=2)
    sizes = {"pp": 2, "micro_batches": 4, "samples": 4, "layers": 4}
    return max(plain, error_of("torch_pipeline", "ScheduleZBVZeroBubble", **sizes))


def test_trains_as_one_process() -> None:
    assert run_ranks(2, _errors)[0] < 1e-3


def test_stages_lie_in_loops_or_down_and_up() -> None:
    assert own_stages("Schedule1F1B", 4, 1) == [1]
    assert own_stages("ScheduleInterleaved1F1B", 4, 1) == [1, 5]
    assert own_stages("ScheduleZBVZeroBubble", 4, 1) == [1, 6]
