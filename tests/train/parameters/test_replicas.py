"""What is done to weights on one rank alone is seen on all."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch

import merakc
from benchmarks.ranks import run_ranks
from merakc.errors import MismatchError
from merakc.machines.cluster import NOMINAL_CPU
from merakc.runtime.part import plain
from tests.train.parameters.test_norms import Tied, batch


def noisy(layout: dict[str, Any]) -> tuple[list[float], str]:
    """The losses of steps with noise of one seed, and what is said where seeds differ."""
    model = merakc.auto_parallel(Tied(), batch(0, 2), cluster=NOMINAL_CPU, **layout)

    def steps(seeds: Sequence[int]) -> list[float]:
        losses = []
        for seed in seeds:
            torch.manual_seed(seed)
            with torch.no_grad():
                for p in model.parameters():
                    plain(p).add_(0.1 * torch.randn(p.shape).double().sum())
            losses.append(model(batch(0, 2))["loss"].item())
        return losses

    losses = steps(range(4))
    with pytest.raises(MismatchError) as told:
        steps([model.rank] * 4)  # some parameters are compared in each
    return losses, str(told.value)


@pytest.mark.parametrize("layout", [{"dp": 2, "state_shards": "zero-0"}, {"tp": 2}], ids=str)
def test_weights_that_differ(layout: dict[str, Any]) -> None:
    (losses, told), (others, also) = run_ranks(2, partial(noisy, layout))
    assert losses == others
    assert told == also
    assert "load, initialise and change weights on all ranks alike" in told
