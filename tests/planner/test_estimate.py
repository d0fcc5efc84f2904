"""Seconds of a step from pieces."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.gpt import Shape, gpt_pieces
from merakc.costs.device import rank_place, traffic_seconds
from merakc.costs.fabric import all_reduce_seconds, axis_group
from merakc.costs.measured import Corrections
from merakc.ir.costs import CostTable
from merakc.ir.program import Mesh, Transfer
from merakc.ir.state import StateShards
from merakc.ir.strategy import Strategy
from merakc.machines.cluster import Nodes
from merakc.machines.cluster_files import preset
from merakc.passes.programs.schedule import build_programs
from merakc.planner.estimate import Estimate, estimate_job, estimate_step, least_seconds
from merakc.planner.job import Framework, make_job
from merakc.schedules.planned import forwards_first
from merakc.schedules.registry import make_schedule
from merakc.simulation.simulate import simulate
from tests.machines.bare import bare

SHAPE = Shape(512, 8, 8, 128, 1024)
PIECES = gpt_pieces(SHAPE, 4, 1)
HARDWARE = preset("a100-80", 4)


def estimate(strategy: Strategy, **ways: Any) -> Estimate:
    return estimate_step(PIECES, strategy, HARDWARE, Framework(**ways))


def test_one_rank_runs_its_micro_batches_and_the_optimizer() -> None:
    found = estimate(Strategy(micro_batches=3))
    (stage,) = found.stages
    assert found.pipeline_s == pytest.approx(3 * (stage.forward_s + stage.backward_s))
    assert found.step_s == pytest.approx(found.pipeline_s + found.optimizer_s)
    rest = {name: n for p in PIECES if not p.path for name, n in p.parameters.items()}
    parameters = sum(rest.values()) + 8 * PIECES[1].parameter_count
    moved = (2 * 12 + 2 + 2) * parameters
    assert found.optimizer_s == pytest.approx(traffic_seconds(moved, HARDWARE.slowest))
    assert (found.bubble_share, found.source) == (pytest.approx(0.0), "formula")


def test_recomputing_runs_the_blocks_again() -> None:
    strategy = Strategy(micro_batches=2)
    for recompute in ("stage", "full"):
        none, again = estimate(strategy), estimate(replace(strategy, recompute=recompute))
        more_s = again.pipeline_s - none.pipeline_s
        assert more_s == pytest.approx(2 * again.stages[0].recompute_s)
        assert again.recompute_s == pytest.approx(more_s)

        piped = Strategy(pp=4, micro_batches=8)
        none, again = estimate(piped), estimate(replace(piped, recompute=recompute))
        assert again.peak_bytes[0] < 0.75 * none.peak_bytes[0]


@pytest.mark.parametrize("memory_bytes", [1 << 40, 1 << 28])
@pytest.mark.parametrize("micro_batches", [4, 24])
@pytest.mark.parametrize(
    ("name", "chunks"), [("1f1b", 1), ("interleaved-1f1b", 2), ("zb-h1", 1), ("zb-v", 2)]
)
def test_no_estimate_is_below_its_bound(
    name: str, chunks: int, micro_batches: int, memory_bytes: int
) -> None:
    strategy = Strategy(pp=4, micro_batches=micro_batches, chunks=chunks, schedule=name)
    node = bare(HARDWARE.slowest, memory_bytes)
    machines = replace(HARDWARE, nodes=(Nodes(node, 4, 1),))
    job = make_job(PIECES, strategy, machines, Framework(stagewise=True))
    least_s = least_seconds(job)
    for recompute in ("none", "solved", "budget", "full", "stage"):
        found = estimate_job(job, recompute=recompute)
        if max(found.peak_bytes) <= memory_bytes:
            assert least_s <= found.pipeline_s * (1 + 1e-9)
    whole = estimate_job(job)
    assert least_s > 0.6 * whole.pipeline_s or memory_bytes < 1 << 40


@pytest.mark.parametrize("whole_batch", [False, True])
@pytest.mark.parametrize(("chunks", "name"), [(1, "1f1b"), (2, "interleaved-1f1b")])
def test_the_pipeline_is_that_of_the_simulator(chunks: int, name: str, whole_batch: bool) -> None:
    strategy = Strategy(pp=4, micro_batches=8, chunks=chunks)
    free = tuple(replace(k, latency_s=0.0, bytes_per_s=1e30) for k in HARDWARE.links)
    framework = Framework(whole_batch=whole_batch)
    found = estimate_step(PIECES, strategy, replace(HARDWARE, links=free), framework)
    schedule = make_schedule(name, 4, 8, virtual_stages=None if chunks == 1 else chunks)
    schedule = forwards_first(schedule) if whole_batch else schedule
    transfers = [Transfer("x", s, s + 1, 1, grad=True) for s in range(schedule.stages - 1)]
    programs = build_programs(Mesh(1, 1, 4), schedule, tuple(transfers))
    table = CostTable(found.stages, 0.0, 1e30)
    assert found.pipeline_s == pytest.approx(simulate(programs, table).step_s, rel=1e-9)
    assert found.bubble_share > 0.1


def test_all_micro_batches_are_held_where_the_loss_waits_for_them() -> None:
    strategy = Strategy(pp=2, micro_batches=64)
    own, whole = estimate(strategy), estimate(strategy, whole_batch=True)
    kept = whole.stages[1].saved_bytes
    assert whole.peak_bytes[1] - own.peak_bytes[1] == pytest.approx(63 * kept)
    assert whole.pipeline_s == pytest.approx(own.pipeline_s, rel=0.01)


MIXED = replace(HARDWARE, nodes=(Nodes(preset("h100").slowest, 2), Nodes(HARDWARE.slowest, 2)))


@pytest.mark.parametrize(("chunks", "name"), [(1, "1f1b"), (2, "interleaved-1f1b"), (2, "zb-v")])
def test_stages_suit_their_devices(chunks: int, name: str) -> None:
    """The step is the simulator's, of stages that no other cut makes more even."""
    strategy = Strategy(pp=4, micro_batches=8, chunks=chunks, schedule=name)
    free = tuple(replace(k, latency_s=0.0, bytes_per_s=1e30) for k in HARDWARE.links)
    pieces = gpt_pieces(Shape(2048, 16, 40, 512, 1024), 4, 1)
    framework = Framework(stagewise=True)
    found = estimate_step(pieces, strategy, replace(MIXED, links=free), framework)
    schedule = make_schedule(name, 4, 8, virtual_stages=None if chunks == 1 else chunks)
    transfers = [Transfer("x", s, s + 1, 1, grad=True) for s in range(schedule.stages - 1)]
    programs = build_programs(Mesh(1, 1, 4), schedule, tuple(transfers))
    simulated = simulate(programs, CostTable(found.stages, 0.0, 1e30))
    assert found.pipeline_s == pytest.approx(simulated.step_s, rel=1e-9)

    job = make_job(pieces, strategy, MIXED, framework)
    assert job.rank_of == schedule.rank_of
    counts = [len(own) for own in job.rank_pieces]
    assert min(counts[:2]) > 1.5 * max(counts[2:])
    seconds = [cost.forward_s + cost.backward_s for cost in found.stages]
    assert max(seconds) < 1.2 * sum(seconds) / len(seconds)
    slow = replace(MIXED, nodes=MIXED.nodes[1:], links=free)
    assert found.pipeline_s < 0.8 * estimate_step(pieces, strategy, slow, framework).pipeline_s


def test_memory_is_that_of_each_rank() -> None:
    device, framework = HARDWARE.slowest, Framework(stagewise=True)
    strategy = Strategy(pp=4, micro_batches=8, recompute="solved")
    whole = estimate_step(PIECES, strategy, HARDWARE, framework)
    tight = bare(device, int(0.8 * whole.peak_bytes[1]))
    unlike = replace(HARDWARE, nodes=(Nodes(device, 1), Nodes(tight, 1), Nodes(device, 2)))
    kept = estimate_step(PIECES, strategy, unlike, framework)
    assert kept.peak_bytes[1] <= tight.memory_bytes < kept.peak_bytes[0]
    assert kept.peak_bytes == (whole.peak_bytes[0], kept.peak_bytes[1], *whole.peak_bytes[2:])
    assert kept.stages == whole.stages


def test_gradients_are_reduced_over_dp() -> None:
    found = estimate(Strategy(dp=8))
    fabric = rank_place(HARDWARE, 8, 1).fabric
    parameters = [p.parameter_count for p in PIECES]
    expected = sum(all_reduce_seconds(2 * n, axis_group(8, 1, fabric), fabric) for n in parameters)
    assert found.state_s == pytest.approx(expected, rel=1e-6)
    assert estimate(Strategy(dp=8), overlap=1.0).state_s < found.state_s
    sharded = estimate(Strategy(dp=8, state_shards=(StateShards(1, 1, 8),)))
    assert sharded.optimizer_s == pytest.approx(found.optimizer_s / 8, rel=1e-3)


def test_tied_parameters_of_two_stages_are_reduced() -> None:
    assert estimate(Strategy(pp=2)).state_s > 0
    assert estimate(Strategy()).state_s == 0


def test_where_axes_lie_decides_which_links_they_use() -> None:
    inner_pp = Strategy(dp=8, tp=1, pp=4, micro_batches=8)
    inner_dp = replace(inner_pp, inner="dp")
    assert (inner_pp.mesh.dp_stride, inner_pp.mesh.pp_stride) == (4, 1)
    assert (inner_dp.mesh.dp_stride, inner_dp.mesh.pp_stride) == (1, 8)
    assert inner_dp.world_size == 32
    assert estimate(inner_pp).state_s > estimate(inner_dp).state_s
    assert estimate(inner_pp).pipeline_s < estimate(inner_dp).pipeline_s


def test_a_part_of_a_message_is_sent_faster() -> None:
    pieces = gpt_pieces(SHAPE, 4, 4)
    strategy = Strategy(tp=4, pp=8, micro_batches=8)
    whole = estimate_step(pieces, strategy, HARDWARE)
    parts = estimate_step(pieces, strategy, HARDWARE, Framework(split_messages=True))
    beside = estimate_step(pieces, strategy, HARDWARE, Framework(tp_overlap=True))
    assert parts.step_s < whole.step_s
    assert beside.step_s < whole.step_s


def test_measured_pieces_are_said_to_be() -> None:
    corrections = Corrections({"block": 0.2, "rest": 0.0})
    found = estimate_step(
        PIECES, Strategy(), HARDWARE, Framework(), corrections,
        lambda piece: ("block",) if piece.path else ("rest",),
    )  # fmt: skip
    plain = estimate(Strategy())
    assert found.source == "measured"
    assert plain.step_s < found.step_s < 1.23 * plain.step_s
    half = estimate_step(
        PIECES,
        Strategy(),
        HARDWARE,
        Framework(),
        corrections,
        lambda p: ("block",) if p.path else (),
    )
    assert half.source == "formula"


def test_ranks_that_share_cores_take_at_least_what_all_do_on_them() -> None:
    strategy = Strategy(pp=4, micro_batches=8)
    alone = preset("cpu")
    plain = estimate_step(PIECES, strategy, alone)
    together = (1.0, 0.9)
    nodes = tuple(replace(n, together=together) for n in alone.nodes)
    shared = estimate_step(PIECES, strategy, replace(alone, nodes=nodes))
    busy_s = 4 * (1 - plain.bubble_share) * plain.pipeline_s
    assert shared.pipeline_s == pytest.approx(busy_s / 1.8)
    assert shared.pipeline_s > plain.pipeline_s
    assert shared.bubble_share == pytest.approx(0.0)
    both = replace(strategy, tp=2)  # of which two compute at once
    least_s = estimate_step(PIECES, both, alone).pipeline_s / 0.9
    assert estimate_step(PIECES, both, replace(alone, nodes=nodes)).pipeline_s >= least_s
    wide = tuple(replace(n, together=(1.0,) * 4) for n in alone.nodes)
    assert estimate_step(PIECES, strategy, replace(alone, nodes=wide)).step_s == plain.step_s
