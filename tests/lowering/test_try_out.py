"""Steps of many micro-batches, tried out with fewer."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.models import MODELS
from merakc.frontend.record import Recording
from merakc.ir.program import ActionKind
from merakc.ir.state import lattice
from merakc.ir.strategy import Strategy
from merakc.lowering.lowered import Lowered, make_plan
from merakc.lowering.predict import predict
from merakc.lowering.try_out import Steps, try_out
from merakc.machines.cluster import NOMINAL_CPU, Cluster
from merakc.simulation.simulate import Simulation
from tests.recorded import one_of_several

MICRO_BATCHES = 96
SCHEDULES = ("1f1b", "interleaved-1f1b", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min", "merak")


@cache
def recording() -> Recording:
    case = MODELS["gpt2"]
    return one_of_several(case.model(), case.batch(2))


@cache
def lowered(dp: int, pp: int, schedule: str) -> Lowered:
    several = {"interleaved-1f1b": 2, "zb-v": 2, "v-half": 2, "v-min": 2}
    strategy = Strategy(
        dp, 1, pp, batch_size=2 * MICRO_BATCHES, micro_batches=MICRO_BATCHES, schedule=schedule,
        chunks=several.get(schedule, 1), recompute="stage" if schedule == "merak" else "none",
    )  # fmt: skip
    return make_plan(recording(), strategy, NOMINAL_CPU)


def assert_same(found: Lowered, cluster: Cluster, steps: Steps | None = None) -> None:
    tried, short = try_out(found, cluster, steps=steps)
    whole, simulation = predict(found, cluster, dp_rank=0)
    assert tried.peak_bytes == whole.peak_bytes
    assert figures(short) == pytest.approx(figures(simulation), rel=1e-8, abs=1e-8 * whole.step_s)
    assert tried.step_s == short.step_s


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-h2", "merak"])
def test_links_of_any_speed_have_steady_steps(schedule: str) -> None:
    """A message of zb-h2 is read two micro-batches after it was sent: on some links the third
    takes longer than the two before it, again and again.
    """
    found = lowered(1, 2, schedule)
    for exponent in range(70, 91):
        cluster = replace(NOMINAL_CPU, link_bytes_per_s=10 ** (exponent / 10), sharing=None)
        hardware = replace(cluster.described(2), overlap=0.3)
        assert_same(found, replace(cluster, hardware=hardware))


def figures(one: Simulation) -> list[float]:
    return [one.step_s, one.bubble_share, *one.busy_s, *one.exposed_s, *one.communication_s]


@settings(max_examples=60)
@given(
    st.sampled_from([(1, 2), (1, 4), (4, 1), (4, 2), (2, 4)]),
    st.sampled_from(SCHEDULES),
    st.sampled_from([1e6, 1e8, 1e10]),
    st.sampled_from([0.3, 0.9, 1.0]),
    st.data(),
)
def test_fewer_micro_batches_say_what_all_do(
    degrees: tuple[int, int], schedule: str, link: float, overlap: float, data: st.DataObject
) -> None:
    dp, pp = degrees
    found = lowered(dp, pp, schedule if pp > 1 else "1f1b")
    shards = data.draw(st.sampled_from(list(lattice(dp))))
    stages = len(found.plan.rank_of)
    found = replace(found, plan=replace(found.plan, state_shards=(shards,) * stages))
    cluster = replace(NOMINAL_CPU, link_bytes_per_s=link, sharing=None)
    hardware = replace(cluster.described(dp * pp), overlap=overlap)
    assert_same(found, replace(cluster, hardware=hardware))


@pytest.mark.parametrize(("dp", "pp", "schedule"), [(4, 1, "1f1b"), (1, 2, "1f1b"), (2, 2, "zb-v")])
def test_most_micro_batches_are_left_out(dp: int, pp: int, schedule: str) -> None:
    found = lowered(dp, pp, schedule)
    steps = Steps(found)
    assert_same(found, NOMINAL_CPU, steps)
    programs, left_out = next(iter(steps))
    assert left_out is not None
    assert left_out.period * left_out.periods > 0.7 * MICRO_BATCHES
    assert len(programs[0].actions) < 0.3 * len(steps.whole[0].actions)


def test_what_is_unlike_its_next_period_is_simulated_whole() -> None:
    """All forwards before all backwards: what a rank holds grows with each micro-batch."""
    found = lowered(1, 2, "gpipe")
    steps = Steps(found)
    assert_same(found, NOMINAL_CPU, steps)
    (_, left_out), *others = steps
    assert left_out is None
    assert not others


def test_few_micro_batches_are_simulated_whole() -> None:
    found = lowered(1, 2, "1f1b")
    few = replace(found, plan=replace(found.plan, batch_size=16, micro_batches=8))
    assert [left_out for _, left_out in Steps(few)] == [None]
    assert_same(few, NOMINAL_CPU)


@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_messages_reach_less_far_than_periods_are_alike(schedule: str, pp: int) -> None:
    """Counted in the Programs: by how many periods a message is read behind its sender's."""
    steps = Steps(lowered(1, pp, schedule))
    for programs, left_out in steps:
        if left_out is None:
            break
        sent: dict[object, int] = {}
        read: dict[object, int] = {}
        for program in programs:
            per_period = left_out.period * len(
                {a.stage for a in program.actions if a.kind.is_compute}
            )
            warm = per_period // left_out.period * left_out.first
            backwards = 0
            for action in program.actions:
                at = (backwards - warm) // per_period
                if action.kind is ActionKind.SEND:
                    sent[action.message] = at
                elif action.kind is ActionKind.RECV:
                    read[action.message] = at
                backwards += action.kind.sends_gradients
        steady = [at - sent[message] for message, at in read.items() if at >= 0]
        assert sent.keys() == read.keys()
        assert max(steady) < left_out.alike, left_out
