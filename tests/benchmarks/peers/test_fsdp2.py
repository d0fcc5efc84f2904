from __future__ import annotations

import pytest

from benchmarks.ranks import run_ranks
from tests.benchmarks.peers.comparing import error_of


@pytest.mark.parametrize("sharding", ["zero-2", "zero-3"])
def test_trains_as_one_process(sharding: str) -> None:
    assert run_ranks(2, error_of, "fsdp2", sharding)[0] < 1e-3
