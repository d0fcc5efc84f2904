"""A report tells what was simulated."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.models import MODELS
from merakc.costs.head import gather_seconds
from merakc.costs.work.kernels import graph_work
from merakc.ir.program import Mesh
from merakc.ir.report import Alternatives
from merakc.lowering.lowered import Lowered
from merakc.lowering.predict import planned_costs
from merakc.machines.cluster import NOMINAL_GPU, Factors, Hardware, Nodes, Profile
from merakc.machines.cluster_files import preset
from merakc.passes.sharding.sequences import heads
from merakc.passes.sharding.sequences import rings as sequence_rings
from merakc.report.analysis import (
    batch_tokens,
    exchanged_heads,
    main_dtype,
    make_report,
    peak_rate,
    rings,
    tp_collectives,
)
from tests.machines.bare import bare
from tests.report.made import (
    ALL_AXES,
    BUSY,
    H100,
    MICRO_BATCHES,
    SAMPLES,
    SLOW,
    coupled,
    lowered,
    report,
)
from tests.report.test_traffic import two_layers

CASES = {
    "all axes": lambda: lowered(),
    "recomputed": lambda: lowered(Mesh(pp=4), recompute="stage"),
    "halves of backwards": lambda: lowered(Mesh(pp=4), "zb-h1"),
    "sharded": lambda: lowered(Mesh(4, 1, 2), shards=(4, 4, 4)),
    "coupled": lambda: coupled(),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Lowered:
    found: Lowered = CASES[request.param]()
    return found


def test_its_verdict_is_the_prediction(case: Lowered) -> None:
    found, expected = report(case).verdict, case.prediction
    assert expected is not None
    assert (found.step_s, found.bubble_share) == (expected.step_s, expected.bubble_share)
    assert found.peak_bytes == max(expected.peak_bytes)
    assert expected.peak_bytes[found.peak_rank] == found.peak_bytes
    assert found.memory_bytes == SLOW.memory_bytes


def test_what_coupling_samples_costs() -> None:
    made = coupled()
    found = report(made, BUSY)
    assert found.head is not None
    assert made.plan.head is not None
    assert made.plan.head.waist_bytes == made.loss.head.size_bytes  # type: ignore[union-attr]
    (stage,) = (s for s in (0, 1) if s == made.head_stage)
    assert found.head.head_s == planned_costs(made, BUSY)[stage].head_s > 0
    assert found.head.longer_s > 0.5 * found.head.head_s
    assert found.head.more_bytes > 0
    assert report(lowered()).head is None
    gathers = [t for t in found.traffic if t.what == "values of samples"]
    assert [t.exposed_s for t in gathers] == [gather_seconds(made.loss.head, made.plan.mesh, BUSY)]  # type: ignore[arg-type]


def test_a_rank_is_weighed_against_its_own_memory() -> None:
    fast, small = bare(preset("h100").slowest), bare(preset("a100-40").slowest, 10**5)
    mixed = Hardware("mixed", (Nodes(fast, 1), Nodes(small, 1)), preset("h100").links)
    found = report(lowered(Mesh(pp=2), cluster=mixed.flat("float32")), mixed.flat("float32"))
    assert [s.device for s in found.stages] == ["h100", "a100-40"]
    assert found.limits_bytes == (fast.memory_bytes, 10**5)
    assert (found.verdict.peak_rank, found.verdict.memory_bytes) == (1, 10**5)
    assert found.verdict.peak_bytes == found.memory[1].peak_bytes
    assert not found.verdict.fits
    same = report(lowered(Mesh(pp=2), cluster=H100), H100)
    assert [m.limit_bytes for m in same.memory] == [0, 0]


def test_the_seconds_of_a_rank_are_the_step(case: Lowered) -> None:
    found = report(case)
    for r in found.ranks:
        parts = (r.compute_s, r.exposed_s, r.tied_s, r.warm_up_s, r.waiting_s, r.cool_down_s)
        assert sum(parts) == pytest.approx(found.verdict.step_s)
        assert min(parts) >= -1e-12
    idle_s = sum(r.warm_up_s + r.waiting_s + r.cool_down_s for r in found.ranks)
    share = idle_s / (len(found.ranks) * found.verdict.step_s)
    assert share == pytest.approx(found.verdict.bubble_share)


@pytest.mark.parametrize("mesh", [Mesh(), ALL_AXES], ids=["one rank", "all axes"])
def test_flops_are_those_that_torch_counts(mesh: Mesh) -> None:
    case = MODELS["gpt2"]
    with FlopCounterMode(display=False) as counter:
        model = case.model()
        model.config._attn_implementation = "sdpa"
        model(**case.batch(SAMPLES)).loss.backward()
    found = report(lowered(mesh)).verdict
    work = graph_work(lowered(mesh).loss.graph)
    attention = sum(
        k.flops * n for own in (work.forward, work.backward) for k, n in own.items()
        if k.kind == "attention"
    )  # fmt: skip
    counted = counter.get_total_flops()
    steps = mesh.dp * MICRO_BATCHES
    # Eager attention on a CPU is not one op with one formula; all else is.
    assert counted - attention <= found.model_flops / steps <= counted + attention


def test_utilization_is_over_all_ranks_at_the_nominal_rate() -> None:
    found = report().verdict
    assert found.ranks == 8
    assert found.peak_flops_per_s == 8 * SLOW.flops_per_s
    assert found.mfu == pytest.approx(found.model_flops / (found.step_s * 8 * SLOW.flops_per_s))
    assert "nominal" in found.peak_source


def test_known_devices_give_the_peak_of_their_data_sheet() -> None:
    rate, named = peak_rate(H100, 16, "bfloat16")
    assert rate == 16 * preset("h100").slowest.peak_flops_per_s["bfloat16"]
    assert named == "h100's peak rate in bfloat16"
    assert peak_rate(NOMINAL_GPU, 4, "bfloat16")[0] == 4 * NOMINAL_GPU.flops_per_s
    assert main_dtype(graph_work(lowered().loss.graph)) == "float32"


def test_tokens_are_what_an_embedding_looks_up() -> None:
    batch = MODELS["gpt2"].batch(SAMPLES)
    assert batch_tokens(lowered().loss.graph) == batch["input_ids"].numel()
    found = report().verdict
    assert found.tokens == batch["input_ids"].numel() * MICRO_BATCHES * ALL_AXES.dp
    assert found.samples == SAMPLES * MICRO_BATCHES * ALL_AXES.dp
    assert make_report(two_layers(Mesh(pp=2)), SLOW).verdict.tokens == 0


def test_stages_are_those_of_the_plan() -> None:
    made = lowered(Mesh(pp=2), "zb-v")
    stages = report(made).stages
    assert [s.rank for s in stages] == [0, 1, 1, 0]
    for s in stages:
        held = [n for n, own in made.plan.parameters.items() if s.stage in own]
        assert (s.parameters > 0) == bool(held)
    assert sum(s.parameters for s in stages) == sum(
        i.spec.numel for g in made.stages.local for i in g.inputs if i.kind == "parameter"
    )


def test_nothing_of_an_offline_plan_is_measured() -> None:
    for cluster in (SLOW, H100):
        origins = make_report(lowered(Mesh(pp=2)), cluster).origins
        assert {o.origin for o in origins} == {"modelled"}
    assert "NVIDIA H100 data sheet" in origins[0].how
    hardware = preset("h100")
    nodes = tuple(replace(n, device=replace(n.device, profile=Profile())) for n in hardware.nodes)
    known = replace(hardware, nodes=nodes, factors=Factors(1.5, 1.25, 2.0, source="3 steps"))
    origins = make_report(lowered(Mesh(pp=2)), known.flat()).origins
    assert [o.origin for o in origins] == ["measured", "modelled", "modelled", "modelled"]
    assert "corrected by 3 steps: forward x 1.50, backward x 1.25" in origins[0].how
    assert "corrected by 3 steps: collectives x 2.00" in origins[1].how


def test_alternatives_are_handed_on() -> None:
    assert report().alternatives is None
    assert make_report(lowered(), SLOW, alternatives=Alternatives()).alternatives == Alternatives()


def test_it_is_small() -> None:
    assert len(json.dumps(asdict(report()), indent=1)) < 60_000
    assert report(replace(lowered(), parts=())).node_count >= len(report().nodes)


def test_exchanges_are_counted_with_the_calls_that_they_are_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(heads, "EXCHANGE_PRICE", 1.01e-3)
    monkeypatch.setattr(sequence_rings, "RING_PRICE", 1e9)
    told = lowered.__wrapped__(Mesh(cp=2))
    calls, collectives = exchanged_heads(told), tp_collectives(told)
    (module,) = {call.split(" at ")[0] for call in calls}
    assert module == "transformer.h.*.attn"
    (layers,) = calls.values()
    assert collectives["forward all-to-all"] == collectives["backward all-to-all"] >= 2 * layers
    assert "forward all-gather" not in collectives
    assert exchanged_heads(lowered(Mesh(tp=2))) == {}


def test_rings_are_counted_with_the_calls_that_they_are_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sequence_rings, "RING_PRICE", 1.01e-9)
    told = lowered.__wrapped__(Mesh(cp=2))
    calls, collectives = rings(told), tp_collectives(told)
    assert {call.split(" at ")[0] for call in calls} == {"transformer.h.*.attn"}
    (layers,) = calls.values()
    assert collectives["forward ring"] == collectives["backward ring"] == layers
    assert collectives["forward all-to-all"] >= 4 * layers  # rows swapped, and back
    assert rings(lowered(Mesh(tp=2))) == {}
