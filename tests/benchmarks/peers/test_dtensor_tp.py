from __future__ import annotations

from benchmarks.ranks import run_ranks
from tests.benchmarks.peers.comparing import error_of


def _error() -> float:
    return error_of("dtensor_tp", "tp", tp=2)


def test_trains_as_one_process() -> None:
    assert run_ranks(2, _error)[0] < 1e-3
