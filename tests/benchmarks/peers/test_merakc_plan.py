from __future__ import annotations

import pytest

from benchmarks.ranks import run_ranks
from tests.benchmarks.peers.comparing import error_of


def _error(form: str) -> float:
    return error_of("merakc_plan", form, tp=2, layers=1)


@pytest.mark.parametrize("form", ["overlap-2", "torchs-products"])
def test_trains_as_one_process(form: str) -> None:
    assert run_ranks(2, _error, form)[0] < 1e-3
