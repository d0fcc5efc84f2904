"""Budgets of bytes are kept by what is predicted of the very graphs."""

from __future__ import annotations

import math
from functools import cache

import pytest

from benchmarks.models import MODELS
from merakc.errors import FitError
from merakc.frontend.record import Recording
from merakc.ir.recompute import Budget
from merakc.lowering.predict import predict
from merakc.machines.cluster import NOMINAL_CPU
from merakc.planner.budget import within_budget
from merakc.planner.request import Request
from merakc.planner.search import plan_layout
from tests.recorded import one_of_several


@cache
def recording(samples: int) -> Recording:
    case = MODELS["gpt2"]
    return one_of_several(case.model(), case.batch(samples))


@pytest.mark.parametrize(("schedule", "shares"), [("1f1b", (0.9, 0.75)), ("zb-h1", (0.97,))])
def test_each_rank_keeps_what_its_budget_lets_it(schedule: str, shares: tuple[float, ...]) -> None:
    request = Request(2, 8, dp=1, tp=1, pp=2, micro_batches=4, schedule=schedule, recompute="none")
    none = plan_layout(request, recording, NOMINAL_CPU)
    before = within_budget(none, NOMINAL_CPU, Budget(share=1.0)).prediction
    assert before is not None
    for share in shares:
        made = within_budget(none, NOMINAL_CPU, Budget(share=share))
        assert made.plan.recompute == "budget"
        found, _ = predict(made, NOMINAL_CPU, dp_rank=0)
        assert made.prediction == found
        assert max(found.peak_bytes) < max(before.peak_bytes)
        assert found.step_s > before.step_s
        before, most = found, max(found.peak_bytes)
        by_bytes = within_budget(none, NOMINAL_CPU, Budget(most))
        assert by_bytes.prediction is not None
        assert max(by_bytes.prediction.peak_bytes) <= most
    with pytest.raises(FitError, match=r"at the least, and the budget that recompute .* 1\.00 KiB"):
        within_budget(none, NOMINAL_CPU, Budget(1 << 10))
    with pytest.raises(FitError, match="the budget of 0 of what it holds beside its state that"):
        within_budget(none, NOMINAL_CPU, Budget(share=0.0))


def test_a_larger_budget_is_hardly_slower() -> None:
    """Each round lands where it lands; what is over is halved where less of it changes nothing."""
    request = Request(2, 16, dp=1, tp=1, pp=2, micro_batches=4, schedule="1f1b", recompute="none")
    none = plan_layout(request, recording, NOMINAL_CPU)
    fastest_s = math.inf
    for share in (0.5, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0):
        made = within_budget(none, NOMINAL_CPU, Budget(share=share))
        assert made.prediction is not None
        assert made.prediction.step_s < 1.01 * fastest_s, share
        fastest_s = min(fastest_s, made.prediction.step_s)
