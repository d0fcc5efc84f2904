"""Where communication runs under computation: chosen by price, or asked for."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.models import MODELS
from merakc.costs.device import place_on
from merakc.costs.nodes import graph_seconds
from merakc.costs.work.flops import PIPELINED
from merakc.errors import ConfigError, PlanError
from merakc.frontend.record import Recording
from merakc.ir.plan_file import PlanFile, load_plan
from merakc.ir.program import Mesh
from merakc.ir.strategy import Strategy
from merakc.kernels.ops import STARTED
from merakc.lowering.lowered import Lowered, apply_plan, make_plan
from merakc.lowering.overlap import (
    choose_chunks,
    choose_fused,
    choose_overlap,
    overlap_gains,
    overlap_place,
    with_parts,
)
from merakc.lowering.predict import planned_costs, predict
from merakc.machines.cluster import NOMINAL_GPU, Cluster, Sharing
from merakc.machines.cluster_files import preset
from merakc.passes.overlap.async_collectives import least_share, stage_seconds
from merakc.passes.overlap.collective_matmul import RowChunks, chunk_rows
from merakc.passes.overlap.fused_products import FusedProducts, fuse_products
from merakc.passes.pipeline import differentiate
from tests.recorded import recorded as record_in_parts

# Samples of a dp rank's batch, of which a micro-batch has 4.
SAMPLES, MICRO_BATCHES = 8, 2
# Links on which the collectives of these tiny models take about as long as their products, far
# longer, and next to nothing; no latencies, so that parts of tensors cost parts of the time, and
# so slow that the least a kernel takes is nothing.
SLOW = Cluster("slow", 1e7, 1e8, 1e-9, 1 << 33, 0.0, 1.5e5)
AT_SLOW = place_on(SLOW, 2)
SLOWEST, FAST = replace(SLOW, link_bytes_per_s=5.0), replace(SLOW, link_bytes_per_s=1e15)


@cache
def recorded(name: str, micro_batches: int) -> Recording:
    case = MODELS[name]
    batch = case.batch(SAMPLES)
    return record_in_parts(case.model(), batch, micro_batches, divided=True)


TP_AND_PP = Mesh(tp=2, pp=2)


def bounded(lowered: Lowered, cluster: Cluster) -> Lowered:
    """The same, whose stages save no more than the bound that the search goes by."""
    place = overlap_place(cluster, lowered.plan.tp)
    for gain, local in zip(overlap_gains(lowered), lowered.stages.local, strict=False):
        assert gain <= 1 - least_share(local, place)
    return lowered


def planned(
    name: str,
    cluster: Cluster,
    asked: int | None,
    mesh: Mesh = TP_AND_PP,
    micro_batches: int = MICRO_BATCHES,
) -> Lowered:
    lowered = make_plan(
        recorded(name, micro_batches),
        Strategy().on(mesh, micro_batches=micro_batches, batch_size=SAMPLES),
        cluster,
    )
    made = choose_overlap(lowered, lambda parts: recorded(name, parts), cluster, asked)
    return bounded(made, cluster)


def test_parts_are_chosen_where_they_pay() -> None:
    lowered = planned("llama", SLOW, None)
    assert set(lowered.plan.sub_batches) <= {2, 4}
    assert min(overlap_gains(lowered)) > 0.15
    assert planned("llama", FAST, None).plan.sub_batches == ()
    # Nothing hides what takes so long, and calls without end cost more than that.
    slow_calls = replace(SLOWEST, op_overhead_s=100.0)
    assert planned("llama", slow_calls, None).plan.sub_batches in ((), (1, 1))


def test_where_cores_carry_messages_two_parts_alone_are_tried() -> None:
    cores = replace(SLOW, gather_share=0.5)
    assert place_on(cores, 2).fabric.by_cores
    assert not AT_SLOW.fabric.by_cores
    plan = planned("llama", cores, None).plan
    assert plan.sub_batches == (2, 2)
    assert plan.row_chunks == {}
    assert planned("llama", SLOW, None, micro_batches=SAMPLES).plan.row_chunks
    assert planned("llama", cores, None, micro_batches=SAMPLES).plan.row_chunks == {}
    assert planned("llama", cores, 3).plan.row_chunks  # what is asked for


def test_where_cores_are_short_nothing_is_hidden() -> None:
    enough, short = (Sharing((1.0,) * cores, 4) for cores in (4, 3))
    assert planned("llama", replace(SLOW, sharing=enough), None).plan.sub_batches
    assert planned("llama", replace(SLOW, sharing=short), None).plan.sub_batches == ()
    assert planned("llama", replace(SLOW, sharing=short), 2).plan.sub_batches == (2, 2)


def test_without_tensor_parallelism_there_is_nothing_to_hide() -> None:
    assert planned("llama", SLOW, 2, Mesh(pp=2)).plan.sub_batches == ()


@pytest.mark.parametrize("count", [1, 2, 4])
def test_what_is_asked_for_is_done(count: int) -> None:
    lowered = planned("llama", FAST, count)
    assert lowered.plan.sub_batches == (count, count)
    assert [parts.count for parts in lowered.parts] == ([count] if count > 1 else [])
    assert planned("llama", SLOW, 0).plan.sub_batches == ()


def test_a_batch_that_does_not_divide_is_refused_where_rows_do_not_either() -> None:
    wanted = r"overlap=13: .* 8 samples does not divide into 2 .* of 13"
    with pytest.raises(ConfigError, match=wanted):
        planned("llama", SLOW, 13)  # of 12 words


def test_a_batch_that_does_not_divide_has_products_in_chunks_of_rows() -> None:
    plan = planned("llama", SLOW, 3).plan
    assert plan.sub_batches == (1, 1)
    assert set(plan.row_chunks.values()) == {3}
    assert plan.row_chunks.keys() <= plan.parameters.keys()


@pytest.mark.parametrize("asked", [None, 2])
def test_of_one_sample_products_are_in_chunks_of_rows(asked: int | None) -> None:
    lowered = planned("llama", SLOW, asked, micro_batches=SAMPLES)
    plan = lowered.plan
    assert plan.sub_batches == (1, 1)
    assert set(plan.row_chunks.values()) <= {2, 4}
    layers = {name.split(".")[2] for name in plan.row_chunks if ".layers." in name}
    assert layers == {"0", "1", "2", "3"}
    whole = planned("llama", SLOW, 1, micro_batches=SAMPLES)
    for stage in (0, 1):
        assert overlap_gains(lowered)[stage] > overlap_gains(whole)[stage] + 0.05
        one, other = (
            sum(graph_seconds(g, AT_SLOW) for g in (c.forward, c.backward) if g)
            for c in (lowered.stage_graphs(stage, 0), whole.stage_graphs(stage, 0))
        )
        assert one < other


def test_only_products_that_gain_by_it_are_in_chunks() -> None:
    local = planned("gpt2", SLOW, 0, micro_batches=SAMPLES).stages.local[1]
    chunks, seconds = choose_chunks(local, AT_SLOW, (2,))
    every = {w: 2 for kind in RowChunks(local).kinds(2) for w in kind}
    assert stage_seconds(chunk_rows(local, chunks), AT_SLOW)[0] == pytest.approx(seconds)
    assert seconds <= stage_seconds(chunk_rows(local, every), AT_SLOW)[0]
    # Where calls cost more than what they hide.
    dear = place_on(replace(SLOW, op_overhead_s=0.1), 2)
    fewer, _ = choose_chunks(local, dear, (2,))
    assert len(fewer) < len(every)


def test_a_model_that_writes_buffers_runs_whole() -> None:
    with pytest.raises(ConfigError, match=r"overlap=2: no stage .* makes no buffer"):
        planned("resnet", SLOW, 2, Mesh(tp=2))


def test_the_plan_says_it_and_means_the_same_everywhere(tmp_path: Path) -> None:
    lowered = planned("llama", SLOW, 2)
    PlanFile(lowered.plan).save(tmp_path / "plan.json")
    plan = load_plan(tmp_path / "plan.json").decisions
    assert plan == lowered.plan
    assert plan.machines == replace(SLOW, memory_bytes=0)
    again = with_parts(
        apply_plan(plan, recorded("llama", MICRO_BATCHES)), lambda parts: recorded("llama", parts)
    )
    one, other = lowered.stage_graphs(0, 0), again.stage_graphs(0, 0)
    assert one.forward == other.forward
    assert one.backward == other.backward
    assert any(node.op in STARTED for node in one.forward.nodes)


def test_a_batch_of_another_size_runs_whole_where_it_does_not_divide() -> None:
    lowered = replace(planned("llama", SLOW, 2), parts=())
    made = with_parts(lowered, lambda parts: recorded("llama", parts), samples=6)
    assert made.parts == ()
    assert made.local(0, 0) == lowered.stages.local[0]


def test_predictions_take_what_is_hidden_off() -> None:
    hidden, blocking = (planned("llama", SLOW, count) for count in (2, 0))
    gain = overlap_gains(hidden)[0]
    # They follow from the plan, where nobody has kept them.
    assert overlap_gains(replace(hidden, gains=None)) == pytest.approx(hidden.gains, rel=1e-12)
    costs = planned_costs(hidden, SLOW), planned_costs(blocking, SLOW)
    assert costs[0][0].forward_s == pytest.approx(costs[1][0].forward_s * (1 - gain))
    assert predict(hidden, SLOW)[0].step_s < predict(blocking, SLOW)[0].step_s


def test_a_graph_that_differs_with_the_number_of_samples_is_refused() -> None:
    lowered = planned("llama", SLOW, 0, Mesh(tp=2))
    wanted = replace(lowered, plan=replace(lowered.plan, sub_batches=(2,)))
    with pytest.raises(PlanError):
        with_parts(wanted, lambda parts: recorded("gpt2", parts)).local(0, 0)


def test_nominal_machines_hide_something_or_nothing() -> None:
    plan = planned("gpt2", NOMINAL_GPU, None).plan
    assert len(plan.sub_batches) in (0, 2)


# Calls take long enough for chunks not to pay.
CALLS = replace(SLOW, op_overhead_s=3e-4)
SYMMETRIC = replace(CALLS, symmetric_memory=True)
AT_SYMMETRIC = place_on(SYMMETRIC, 2)


def fused_plan(name: str, cluster: Cluster, asked: int | None = None) -> Lowered:
    """Micro-batches of one sample, with split sequences."""
    recording = recorded(name, SAMPLES)
    lowered = make_plan(
        recording,
        Strategy().on(TP_AND_PP, micro_batches=SAMPLES, batch_size=SAMPLES, sequence_parallel=True),
        cluster,
    )
    made = choose_overlap(lowered, lambda parts: recorded(name, parts), cluster, asked)
    return bounded(made, cluster)


def test_products_are_fused_with_their_collectives_in_symmetric_memory() -> None:
    lowered = fused_plan("llama", SYMMETRIC)
    plan = lowered.plan
    assert plan.sub_batches == (1, 1)
    assert plan.row_chunks == {}
    assert plan.machines is not None
    assert plan.machines.symmetric_memory
    layers = {name.split(".")[2] for name in plan.fused_products if ".layers." in name}
    assert layers == {"0", "1", "2", "3"}
    other = fused_plan("llama", CALLS)
    assert other.plan.fused_products == ()
    for stage in (0, 1):
        assert overlap_gains(lowered)[stage] > overlap_gains(other)[stage] + 0.03
        chunk, whole = lowered.stage_graphs(stage, 0), lowered.stages.local[stage]
        assert any(n.op in PIPELINED for n in chunk.forward.nodes)
        blocking_s = graph_seconds(differentiate(whole).forward, AT_SYMMETRIC)
        assert graph_seconds(chunk.forward, AT_SYMMETRIC) < 0.93 * blocking_s


def test_chunks_of_rows_are_taken_where_they_hide_more() -> None:
    plan = fused_plan("llama", replace(SLOW, symmetric_memory=True)).plan
    assert plan.fused_products == ()
    assert plan.row_chunks


@pytest.mark.parametrize("asked", [0, 1, 2])
def test_what_is_asked_for_is_not_fused(asked: int) -> None:
    assert fused_plan("llama", SYMMETRIC, asked).plan.fused_products == ()


def test_only_products_that_gain_by_it_are_fused() -> None:
    local = fused_plan("llama", SYMMETRIC, 0).stages.local[1]
    weights, seconds = choose_fused(local, AT_SYMMETRIC)
    assert stage_seconds(fuse_products(local, weights), AT_SYMMETRIC)[0] == pytest.approx(seconds)
    every = frozenset().union(*FusedProducts(local).kinds())
    assert seconds <= stage_seconds(fuse_products(local, every), AT_SYMMETRIC)[0]
    assert weights < every
    other = fused_plan("llama", SYMMETRIC, 0).stages.local[0]
    (none,) = {choose_fused(replace(other, nodes=other.nodes[:1], outputs=()), AT_SYMMETRIC)}
    assert none == (frozenset(), math.inf)


def test_a_plan_with_fused_products_means_the_same_everywhere(tmp_path: Path) -> None:
    lowered = fused_plan("gpt2", SYMMETRIC)
    assert lowered.plan.fused_products
    PlanFile(lowered.plan).save(tmp_path / "plan.json")
    plan = load_plan(tmp_path / "plan.json").decisions
    assert plan == lowered.plan
    again = apply_plan(plan, recorded("gpt2", SAMPLES))
    for stage in (0, 1):
        assert lowered.stage_graphs(stage, 0) == again.stage_graphs(stage, 0)


def wide_llama() -> Recording:
    """Two layers as wide as those of a model of 70 B, on one long sample."""
    config = LlamaConfig(
        vocab_size=1024, hidden_size=8192, intermediate_size=28672, num_hidden_layers=2,
        num_attention_heads=64, num_key_value_heads=8, max_position_embeddings=8192,
        use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    ids = torch.zeros(1, 8192, dtype=torch.long)
    return record_in_parts(model, {"input_ids": ids, "labels": ids})


def test_a_node_of_h100_fuses_the_products_of_wide_layers() -> None:
    recording, h100 = wide_llama(), preset("h100")
    nodes = tuple(replace(own, devices=4, count=2) for own in h100.nodes)
    apart = (replace(h100.links[0], devices=4), h100.links[1])
    plain = tuple(replace(link, symmetric_memory=False) for link in h100.links)
    plans = []
    for hardware in (h100, replace(h100, links=plain), replace(h100, nodes=nodes, links=apart)):
        cluster = hardware.flat()
        lowered = make_plan(
            recording,
            Strategy().on(Mesh(1, 8, 1), micro_batches=1, batch_size=1, sequence_parallel=True),
            cluster,
        )
        plans.append(bounded(choose_overlap(lowered, lambda _: recording, cluster, None), cluster))
    fused, *others = plans
    layer = "model.layers.{}.self_attn.{}_proj.weight"
    assert {layer.format(k, name) for k in (0, 1) for name in "qkv"} < set(
        fused.plan.fused_products
    )
    assert others[0].plan.fused_products == others[1].plan.fused_products == ()
    assert overlap_gains(fused)[0] > (*overlap_gains(others[0]), 0.0)[0]
