"""No layout takes less than its bound says."""

from __future__ import annotations

import pytest

from merakc.machines.cluster import Hardware
from merakc.planner import candidates
from merakc.planner.bounds import Bounds
from merakc.planner.request import Request
from tests.planner.test_candidates import HARDWARE, TABLE, find, mixed


@pytest.mark.parametrize("hardware", [HARDWARE, mixed()], ids=["alike", "unlike"])
def test_bounds_hold(hardware: Hardware, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidates, "RUNNERS_UP", 10**6)
    bounds, everything = Bounds(TABLE, hardware), find(Request(8, 0), hardware).ranked
    assert len({one.strategy.mesh for one in everything}) > 5
    for one in everything:
        assert bounds.of(one.strategy) <= one.estimate.pipeline_s * (1 + 1e-9)
