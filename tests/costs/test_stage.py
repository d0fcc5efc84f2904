"""What the computes of a stage cost."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from benchmarks.models import MODELS
from merakc.costs.device import place_on, rank_place, work_seconds
from merakc.costs.stage import (
    faster,
    reduced_bytes,
    rough_seconds,
    stage_cost,
    static_bytes,
    with_seconds,
)
from merakc.costs.work.kernels import graph_work
from merakc.ir.graph import Graph, Input, InputKind, TensorSpec
from merakc.ir.precision import parse_precision
from merakc.ir.program import ActionKind, Mesh
from merakc.ir.state import StateShards
from merakc.ir.strategy import Strategy
from merakc.lowering.lowered import Lowered, make_plan
from merakc.machines.cluster import NOMINAL_CPU, Factors
from merakc.machines.cluster_files import preset
from tests.recorded import one_of_several

CPU = place_on(NOMINAL_CPU, 1)


@cache
def lowered(schedule: str, recompute: str) -> Lowered:
    case = MODELS["gpt2"]
    recording = one_of_several(case.model(), case.batch(2))
    return make_plan(
        recording,
        Strategy().on(Mesh(pp=2), micro_batches=4, schedule=schedule, recompute=recompute),
        NOMINAL_CPU,
    )


@pytest.mark.parametrize("stage", [0, 1])
def test_recomputation_trades_seconds_for_bytes(stage: int) -> None:
    none, whole, some, every = (
        stage_cost(lowered("1f1b", how).stage_graphs(stage, 0), CPU)
        for how in ("none", "stage", "selective", "full")
    )
    assert none.recompute_s == none.checkpoint_bytes == 0
    assert whole.checkpoint_bytes < none.saved_bytes <= whole.saved_bytes
    assert 0 < whole.recompute_s <= whole.forward_s
    assert whole.checkpoint_peak_bytes < none.forward_peak_bytes
    assert whole.backward_s == none.backward_s
    assert some.recompute_s == every.recompute_s == 0
    assert every.saved_bytes < some.saved_bytes < none.saved_bytes
    assert none.backward_s < some.backward_s < every.backward_s <= none.backward_s + none.forward_s


@pytest.mark.parametrize("stage", [0, 1])
def test_the_halves_of_a_backward_take_as_long_as_the_whole(stage: int) -> None:
    # But for launches, which are hidden within a half alone.
    cost = stage_cost(lowered("zb-h1", "none").stage_graphs(stage, 0), CPU)
    assert cost.input_grad_s + cost.weight_grad_s == pytest.approx(cost.backward_s, rel=0.01)
    assert 0 < cost.deferred_bytes <= cost.saved_bytes + cost.backward_peak_bytes


def test_measured_seconds_replace_those_of_the_formula() -> None:
    cost = stage_cost(lowered("1f1b", "stage").stage_graphs(0, 0), CPU)
    found = with_seconds(cost, {ActionKind.BACKWARD: 7.0, ActionKind.RECOMPUTE: 3.0})
    assert (found.forward_s, found.backward_s, found.recompute_s) == (cost.forward_s, 7.0, 3.0)
    assert found.saved_bytes == cost.saved_bytes


@pytest.mark.parametrize("precision", [None, "bf16-mixed"])
@pytest.mark.parametrize("counts", [(1, 1, 1), (1, 1, 4), (1, 4, 4), (4, 4, 4)])
def test_sharded_state_is_a_share(counts: tuple[int, int, int], precision: str | None) -> None:
    compute = torch.bfloat16 if precision else torch.float32
    spec = TensorSpec((8, 16), compute)
    graph = Graph(
        (
            Input("w", InputKind.PARAMETER, spec, "w", True),
            Input("frozen", InputKind.PARAMETER, spec, "frozen"),
            Input("buffer", InputKind.BUFFER, TensorSpec((3,), torch.int64), "buffer"),
        ),
        (),
        (),
    )
    p, g, os = counts
    size, whole = 8 * 16, spec.size_bytes
    parameters, gradients = 2 * whole // p, whole // g
    optimized = size * (12 if precision else 8) // os  # a master in mixed precision
    on_the_way = (2 * whole if p > 1 else 0) + (whole if g > 1 else 0)
    expected = 3 * 8 + parameters + gradients + optimized + on_the_way
    shards = StateShards(*counts), parse_precision(precision)
    assert static_bytes(graph, *shards) == expected
    filling = whole if g > 1 else 0
    assert reduced_bytes(graph, *shards) == 4 * size // os - gradients - filling


def test_a_faster_stage_has_the_same_bytes() -> None:
    cost = stage_cost(lowered("1f1b", "none").stage_graphs(0, 0), CPU)
    made = faster(cost, 0.5)
    assert made.forward_s == cost.forward_s / 2
    assert made.backward_s == cost.backward_s / 2
    assert made.saved_bytes == cost.saved_bytes


def test_seconds_where_the_devices_are_known() -> None:
    local = lowered("1f1b", "stage").stages.local[0]
    hardware = preset("a100-80")
    work, place = graph_work(local), rank_place(hardware, 8)
    forward_s, backward_s = rough_seconds(local, place_on(hardware.flat(), 8))
    assert forward_s == work_seconds(work.forward, place)
    assert backward_s == work_seconds(work.backward, place) > forward_s
    slower = replace(hardware.slowest, launch_s=2 * hardware.slowest.launch_s, bytes_per_s=1e9)
    assert rough_seconds(local, place_on(hardware.flat(), 8, slower))[0] > forward_s
    assert (
        rough_seconds(local, place_on(replace(hardware.flat(), hardware=None), 8))[0] != forward_s
    )


def test_measured_steps_correct_the_seconds_of_graphs() -> None:
    planned = lowered("1f1b", "none")
    chunk = planned.stage_graphs(0, 0)
    hardware = preset("cpu")
    slow = replace(hardware, factors=Factors(forward=2.0, backward=3.0))
    before, after = (
        stage_cost(chunk, place_on(own.flat("float32"), 1)) for own in (hardware, slow)
    )
    assert after.forward_s == pytest.approx(2 * before.forward_s)
    assert after.backward_s == pytest.approx(3 * before.backward_s)
    local = planned.stages.local[0]
    rough, corrected = (
        rough_seconds(local, place_on(own.flat("float32"), 1)) for own in (hardware, slow)
    )
    assert corrected == pytest.approx((2 * rough[0], 3 * rough[1]))
