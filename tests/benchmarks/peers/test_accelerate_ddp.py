from __future__ import annotations

import pytest

from benchmarks.ranks import run_ranks
from tests.benchmarks.peers.comparing import error_of


def test_trains_as_one_process() -> None:
    pytest.importorskip("accelerate")
    assert run_ranks(2, error_of, "accelerate_ddp", "ddp")[0] < 1e-3
