"""What is updated on the host: what is asked for, or no more than what devices have no room for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from merakc.analysis.buckets import parameters_in_order
from merakc.errors import ConfigError, FitError
from merakc.ir.plan import Plan
from merakc.ir.state import StateShards
from merakc.lowering.lowered import Lowered
from merakc.lowering.predict import predict
from merakc.machines.cluster import NOMINAL_CPU, Cluster
from merakc.machines.links import Host
from merakc.planner.choose import choose, compare
from merakc.planner.fit import fit_error
from merakc.planner.host_state import all_on_host, host_need, with_host_states
from merakc.planner.request import Request
from tests.planner.test_piece_table import llama as record
from tests.report.made import lowered
from tests.small_buckets import small_buckets

WHOLE = Request(1, 0, total_batch_size=4, micro_batches=4)
WAYS = ("", "bf16-mixed")


def with_bytes(memory_bytes: int, host: Host | None = NOMINAL_CPU.host) -> Cluster:
    return replace(NOMINAL_CPU, memory_bytes=memory_bytes, host=host)


def made(precision: str) -> Lowered:
    found = lowered(precision=precision or None)
    return replace(found, prediction=predict(found, NOMINAL_CPU, dp_rank=0)[0])


def peaks(found: Lowered) -> tuple[int, ...]:
    assert found.prediction is not None
    return found.prediction.peak_bytes


def trained(plan: Plan) -> set[str]:
    return set(plan.parameters)


@pytest.mark.parametrize("precision", WAYS)
def test_what_is_asked_for(precision: str) -> None:
    plain = made(precision)
    assert with_host_states(plain, "none", NOMINAL_CPU) is plain
    assert with_host_states(plain, "activations", NOMINAL_CPU) is plain
    every = with_host_states(plain, "optimizer", NOMINAL_CPU)
    assert set(every.plan.host_states) == trained(every.plan)
    assert every.plan.offload == "optimizer"
    assert all(a < b for a, b in zip(peaks(every), peaks(plain), strict=True))
    assert every.prediction is not None
    assert min(every.prediction.host_s) > 0
    some = with_host_states(plain, "optimizer, 50 kB", NOMINAL_CPU)
    assert set() < set(some.plan.host_states) < set(every.plan.host_states)


@pytest.mark.parametrize("precision", WAYS)
def test_no_more_than_what_has_no_room(precision: str) -> None:
    plain = made(precision)
    least = peaks(with_host_states(plain, "optimizer", NOMINAL_CPU))
    assert with_host_states(plain, "auto", with_bytes(max(peaks(plain)))) is plain
    assert with_host_states(plain, "auto", with_bytes(max(least) - 1)) is plain  # nothing helps
    assert with_host_states(plain, "auto", with_bytes(max(least), host=None)) is plain
    sizes = [i.spec.numel for g in plain.stages.local for i in g.told(parameters_in_order)]
    for share in (0.2, 0.8):
        most = round(max(least) + share * (max(peaks(plain)) - max(least)))
        found = with_host_states(plain, "auto", with_bytes(most))
        assert 0 <= most - max(peaks(found)) <= 12 * max(sizes)  # a parameter's, in float32
        assert set() < set(found.plan.host_states) < trained(found.plan)


@pytest.mark.parametrize("precision", WAYS)
def test_parameters_are_fetched_where_they_are_to_be(precision: str) -> None:
    plain = made(precision)
    with small_buckets():
        updated = with_host_states(plain, "optimizer", NOMINAL_CPU)
        found = with_host_states(plain, "parameters", NOMINAL_CPU)
    assert set(found.plan.host_parameters) == trained(found.plan)
    assert (found.plan.host_states, found.plan.offload) == (
        updated.plan.host_states, "optimizer, parameters",
    )  # fmt: skip
    assert all(a < b for a, b in zip(peaks(found), peaks(updated), strict=True))
    assert found.prediction is not None
    assert updated.prediction is not None
    assert found.prediction.step_s > updated.prediction.step_s
    sharded = replace(plain, plan=replace(plain.plan, dp=2, state_shards=(StateShards(1, 1, 2),)))
    with pytest.raises(ConfigError, match="a rank updates what it keeps of parameters"):
        with_host_states(sharded, "parameters", NOMINAL_CPU)


def test_they_are_the_last_to_go() -> None:
    plain = made("")
    with small_buckets():
        updated = with_host_states(plain, "optimizer", NOMINAL_CPU)
        every = with_host_states(plain, "parameters", NOMINAL_CPU)
        room = (max(peaks(updated)) + max(peaks(every))) // 2
        found = with_host_states(plain, "auto", with_bytes(room))
    assert found.plan.host_states == updated.plan.host_states
    assert set() < set(found.plan.host_parameters) < trained(found.plan)
    assert max(peaks(found)) <= room


def test_frozen_parameters_are_fetched_too() -> None:
    plain = made("")
    graphs = tuple(
        replace(g, inputs=tuple(replace(i, requires_grad=False) for i in g.inputs))
        for g in plain.stages.graphs
    )
    frozen = replace(plain, stages=replace(plain.stages, graphs=graphs))
    found = with_host_states(frozen, "parameters", NOMINAL_CPU)
    assert (found.plan.offload, found.plan.host_states) == ("parameters", ())
    assert set(found.plan.host_parameters) == trained(found.plan)
    needs = [
        sum(i.spec.size_bytes for i in g.told(parameters_in_order)) for g in frozen.stages.local
    ]
    assert host_need(found) == max(needs)


def test_a_host_that_is_unknown_or_too_small_is_refused() -> None:
    plain = made("")
    with pytest.raises(ConfigError, match=r"add \[nodes.host\] to the cluster file"):
        with_host_states(plain, "optimizer", with_bytes(1 << 33, host=None))
    small = with_bytes(1 << 33, host=Host(2048, 1e9, 1e9, 1e9))
    with pytest.raises(ConfigError, match=r"moves .* KiB to its host, .* may use 2\.00 KiB"):
        with_host_states(plain, "optimizer", small)
    assert all_on_host(plain, "auto", small) is None
    assert all_on_host(plain, "auto", NOMINAL_CPU) is not None


def test_a_model_that_does_not_fit_is_told_and_planned_with_its_state_on_the_host() -> None:
    whole = compare(WHOLE, record, NOMINAL_CPU).ranked[0].peak_bytes
    asked = replace(WHOLE, offload="optimizer")
    moved = compare(asked, record, NOMINAL_CPU).ranked[0]
    assert moved.strategy.offload == "optimizer"
    small = with_bytes(round(0.7 * moved.peak_bytes + 0.3 * whole))
    fixed = replace(WHOLE, recompute="none")
    assert not compare(fixed, record, small).ranked
    error = fit_error(fixed, record, small)
    assert isinstance(error, FitError)
    assert "with offload='auto' it fits: dp=1 tp=1 pp=1" in str(error)
    found = choose(replace(fixed, offload="auto"), record, small)
    assert 0 < len(found.plan.host_states) < len(found.plan.parameters)
    assert max(peaks(found)) <= small.memory_bytes
