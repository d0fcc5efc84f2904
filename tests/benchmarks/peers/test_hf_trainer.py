from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from benchmarks.peers.training import Training
from benchmarks.ranks import run_ranks
from tests.benchmarks.peers.comparing import error_of


def test_trains_as_one_process() -> None:
    pytest.importorskip("accelerate")
    assert run_ranks(2, error_of, "hf_trainer", "ddp")[0] < 1e-3


def test_what_fails_in_the_thread_is_raised() -> None:
    pytest.importorskip("accelerate")
    from benchmarks.peers.hf_trainer import contestant_of

    class Failing:
        def add_callback(self, callback: Any) -> None:
            pass

        def train(self) -> None:
            raise RuntimeError("no step")

    contestant = contestant_of(Failing(), nn.Linear(1, 1))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="no step"):
        contestant.step(Training().batch(0))
