from __future__ import annotations

import pytest

from benchmarks.ranks import run_ranks
from tests.benchmarks.peers.comparing import error_of


@pytest.mark.parametrize("sharding", ["zero-0", "zero-1"])
def test_trains_as_one_process(sharding: str) -> None:
    assert run_ranks(2, error_of, "torch_ddp", sharding)[0] < 1e-3
