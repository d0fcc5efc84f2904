from __future__ import annotations

from benchmarks.ranks import run_ranks
from tests.benchmarks.peers.comparing import error_of


def _error() -> float:
    return error_of("merakc_plan", "overlap-2", tp=2, layers=1)


def test_trains_as_one_process() -> None:
    assert run_ranks(2, _error)[0] < 1e-3
