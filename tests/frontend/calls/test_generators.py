"""Random numbers that a recording would hold on to are refused, and given back."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from merakc.errors import RecordError
from merakc.frontend.calls.generators import GeneratorWatch
from merakc.frontend.record import record
from tests.frontend.small import Small, linear, randn

DRAWS: dict[str, Callable[[], Any]] = {
    "Python's random": random.random,
    "numpy.random": lambda: np.random.rand(2),
    "torch": lambda: torch.rand(2),
}


@pytest.mark.parametrize("library", DRAWS)
def test_a_draw_is_seen_and_given_back(library: str) -> None:
    model = nn.ModuleDict({"layer": nn.Linear(1, 1)})
    watch = GeneratorWatch()
    watch.check("layer", model)
    states = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()
    DRAWS[library]()
    with pytest.raises(RecordError, match=rf"module 'layer' \(.*linear.py:\d+\).*from {library}"):
        watch.check("layer", model)
    watch.check("layer", model)
    assert random.getstate() == states[0]
    assert (np.random.get_state()[1] == states[1]).all()
    assert torch.equal(torch.get_rng_state(), states[2])


@pytest.mark.parametrize("library", ["Python's random", "numpy.random"])
def test_the_module_that_draws_is_named(library: str) -> None:
    def masked(s: Any, x: torch.Tensor) -> torch.Tensor:
        y = s.layer(x)
        number = float(np.sum(DRAWS[library]()))
        return s.layer(y * number)

    model = Small(lambda s, x: s.inner(x).sum(), inner=Small(masked, layer=linear()))
    with pytest.raises(RecordError, match=rf"module 'inner' .*from {library}"):
        record(model, (randn(2, 6),), {})


def test_a_draw_is_named_also_where_the_forward_then_fails() -> None:
    def masked(s: Any, x: torch.Tensor) -> torch.Tensor:
        y = s.layer(x * random.random())
        return y if y.sum() > 0 else -y

    model = Small(lambda s, x: s.inner(x).sum(), inner=Small(masked, layer=linear()))
    state = random.getstate()
    with pytest.raises(RecordError, match=r"module 'inner' .*from Python's random"):
        record(model, (randn(2, 6),), {})
    assert random.getstate() == state


def test_a_recording_draws_nothing() -> None:
    model = Small(lambda s, x: s.drop(s.layer(x)).sum(), layer=linear(), drop=nn.Dropout(0.5))
    before = torch.get_rng_state()
    record(model, (torch.ones(2, 6, dtype=torch.float64),), {})
    assert torch.equal(torch.get_rng_state(), before)
