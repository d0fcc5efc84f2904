"""Plans made without ranks, for a batch over all of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from merakc.api import auto_parallel
from merakc.equality.check import check_source
from merakc.errors import ConfigError, CutError, PlanError, RecordError
from merakc.frontend.record import Recording, record
from merakc.machines.cluster import NOMINAL_CPU
from merakc.planner.offline import Recordings, plan_offline
from merakc.planner.request import Request
from merakc.planner.sources.source import load_source
from merakc.planner.what_if import simulated
from tests.small_source import branching


def test_no_size_of_batch_is_recorded_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    def counted(*args: Any, **options: Any) -> Recording:
        seen.append(options["repeated"])
        return record(*args, **options)

    monkeypatch.setattr("merakc.lowering.forwards.record", counted)
    recordings = Recordings(load_source("tests.small_source:small"), Request(2, 0), lambda _: None)
    alone = {n: Recordings(recordings.source, Request(2, 0), lambda _: None)(n) for n in (2, 4)}
    seen.clear()
    for samples in (2, 4, 2, 1):
        found = recordings(samples)
        assert str(found.graph) == str(alone.get(samples, found).graph)
    assert seen == [True, False, False, False]  # of 2, 4, 8 and 1 samples


def test_each_degree_that_divides_the_batch_is_tried() -> None:
    source, said = load_source("tests.small_source:small"), []
    lowered, others = plan_offline(source, Request(4, 0), 6, NOMINAL_CPU, said.append)
    plan = lowered.plan
    assert plan.mesh.world_size == 4
    assert plan.batch_size * plan.dp == 6
    assert plan.dp in (1, 2)  # of 1, 2 and 4
    assert len({a.strategy.mesh for a in others.runners_up}) > 1
    assert all(a.step_s > 0 and a.loses for a in others.runners_up)
    shown = [replace(a, step_s=0.0, peak_bytes=0, loses="") for a in others.runners_up]
    assert len(set(shown)) == len(shown)  # each differs in what is told of it
    assert others.chosen_s > 0
    own = (plan.dp, plan.tp, plan.pp, plan.micro_batches, plan.schedule, plan.sequence_parallel)
    assert own not in {
        (s.dp, s.tp, s.pp, s.micro_batches, s.schedule, s.sequence_parallel)
        for s in (a.strategy for a in others.runners_up)
        if s.stage_count == len(plan.rank_of) and s.recompute == plan.recompute
    }
    assert any(text.startswith("comparing") for text in said)
    assert lowered.prediction is not None
    for dp in (1, 2):
        other, *_ = plan_offline(source, Request(4, 0, dp=dp), 6, NOMINAL_CPU)
        assert other.prediction is not None
        assert other.plan.dp == dp
        assert other.prediction.step_s >= lowered.prediction.step_s


def test_what_cannot_be() -> None:
    source = load_source("tests.small_source:small")
    with pytest.raises(ConfigError, match="6 samples does not divide over dp=4 of 4 ranks"):
        plan_offline(source, Request(4, 0, dp=4), 6, NOMINAL_CPU)
    with pytest.raises((CutError, PlanError)):
        plan_offline(source, Request(64, 0, pp=64), 6, NOMINAL_CPU)


def test_a_model_that_branches_on_values_is_planned_for_one_dp_rank_by_its_own_batch() -> None:
    source = load_source("tests.small_source:branching")
    with pytest.raises(RecordError, match="train with dp=1"):
        plan_offline(source, Request(2, 0), 4, NOMINAL_CPU)
    for asked in (
        Request(1, 0, micro_batches=1), Request(1, 0, micro_batches=2), Request(2, 0, dp=1),
        Request(2, 0, tp=2),
    ):  # fmt: skip
        plan = plan_offline(source, asked, 4, NOMINAL_CPU)[0].plan
        assert plan.dp == 1
        assert "second.weight" in plan.parameters
        check_source(plan, source)
        assert simulated(plan, source, NOMINAL_CPU).decisions == plan
        if plan.mesh.world_size == 1:
            trained = auto_parallel(branching()[0], source.example, plan=plan)
            assert trained.plan == plan
