"""Which plan wins."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from unittest.mock import patch

import pytest
import torch
from torch import nn

from benchmarks.models import MODELS
from benchmarks.peers.training import Training
from merakc.errors import ConfigError, CutError, ShardError
from merakc.frontend.record import Recording
from merakc.ir.precision import NAMED
from merakc.ir.program import ActionKind
from merakc.ir.state import StateShards, lattice
from merakc.lowering.predict import predict
from merakc.machines.cluster import NOMINAL_CPU, Cluster, Hardware, Nodes, Sharing
from merakc.machines.cluster_files import hardware_for
from merakc.planner import choose as module
from merakc.planner.choose import choose, compare
from merakc.planner.request import Request, meshes, with_schedule
from merakc.planner.search import SAME, improve, plan_layout
from tests.machines.bare import bare
from tests.recorded import one_of_several
from tests.small_buckets import small_buckets

BATCH_SIZE = 8


@cache
def recording(samples: int) -> Recording:
    case = MODELS["gpt2"]
    return one_of_several(case.model(), case.batch(samples))


def test_the_fastest_plan_that_fits_is_taken() -> None:
    request = Request(2, BATCH_SIZE)
    best = choose(request, recording, NOMINAL_CPU)
    assert best.plan.mesh in meshes(request)
    assert best.prediction is not None
    least_s = best.prediction.step_s / best.plan.dp
    for mesh in meshes(request):
        fixed = replace(request, dp=mesh.dp, tp=mesh.tp, pp=mesh.pp)
        other = choose(fixed, recording, NOMINAL_CPU)
        assert other.prediction is not None
        assert least_s <= other.prediction.step_s / other.plan.dp


@pytest.mark.parametrize("slower", [1.0, 3.0])
def test_what_pieces_call_faster_than_the_best_in_full_is_planned(
    slower: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = Request(8, 0, total_batch_size=16)
    candidates = compare(request, recording, NOMINAL_CPU)
    finalists = {str(one.asked): one for one in module._finalists(request, candidates)}
    tried: list[float] = []

    def in_full(asked: Request, *_: object) -> float:
        """As many times slower than its pieces, until the fifth."""
        tried.append(finalists[str(asked)].sample_s)
        return tried[-1] * (slower if len(tried) < 5 else 1.0)

    monkeypatch.setattr(module, "FINALIST_NODES", 0)  # there is time for two
    monkeypatch.setattr(module, "plan_layout", in_full)
    monkeypatch.setattr(module, "standing", lambda sample_s, _: (False, sample_s, 0))
    found = [*module._planned(request, candidates, recording, NOMINAL_CPU, str, [])]
    every = [one.sample_s for one in finalists.values()]
    if slower == 1.0:
        others = [one for one in finalists.values() if one.sample_s not in tried]
        assert len(found) == 2 or all(one.least_sample_s >= min(found) for one in others)
    else:
        assert 5 <= len(found) < module.MOST_FINALISTS
        left = [sample_s for sample_s in every if sample_s not in tried]
        assert all(sample_s * module.OFF >= min(found) for sample_s in left)


class Rows(nn.Module):
    """Of which no dim is a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.layers(x).square().sum()}


@pytest.mark.parametrize("pp", [1, None])
def test_what_has_no_sequences_is_planned_though_ranks_are_more_than_samples(pp: int) -> None:
    def recorded(samples: int) -> Recording:
        return one_of_several(Rows(), {"x": torch.zeros(samples, 16)})

    request = Request(2, 1, dp=1, pp=pp, total_batch_size=1)
    assert choose(request, recorded, NOMINAL_CPU).plan.cp == 1


def test_where_nothing_fits_recomputation_and_a_split_model_win() -> None:
    roomy = choose(Request(4, BATCH_SIZE), recording, NOMINAL_CPU)
    assert roomy.prediction is not None
    tight = replace(NOMINAL_CPU, memory_bytes=max(roomy.prediction.peak_bytes) * 3 // 4)
    best = choose(Request(4, BATCH_SIZE), recording, tight)
    assert best.prediction is not None
    assert max(best.prediction.peak_bytes) < max(roomy.prediction.peak_bytes)
    fixed = choose(Request(1, BATCH_SIZE, micro_batches=1), recording, tight)
    assert fixed.plan.recompute in ("solved", "stage", "budget")
    parts = choose(Request(1, BATCH_SIZE), recording, tight)
    assert parts.plan.recompute == "none"
    assert parts.plan.micro_batches > 1
    kept = choose(Request(1, BATCH_SIZE, recompute="none"), recording, tight)
    assert kept.plan.recompute == "none"


def test_what_fits_in_one_piece_by_recomputation_alone_is_compared_with_parts() -> None:
    """As a GPT-2 on one H100, whose 256 samples took 2.08 s in one piece, 1.84 s in four."""
    request = Request(1, BATCH_SIZE)
    with patch("merakc.planner.choose.compare", wraps=compare) as compared:
        roomy = choose(request, recording, NOMINAL_CPU)
        assert not compared.called
        assert roomy.prediction is not None
        tight = replace(NOMINAL_CPU, memory_bytes=max(roomy.prediction.peak_bytes) - 1)
        choose(replace(request, micro_batches=1), recording, tight)
        assert not compared.called
        best = choose(request, recording, tight)
        assert best.plan.recompute == "budget"
        assert compared.called


@pytest.mark.parametrize("gather_share", [NOMINAL_CPU.gather_share, 1.0])
def test_sequences_are_split_where_gathers_are_as_fast_as_all_reduces(gather_share: float) -> None:
    training = Training(samples=8, layers=2)
    with torch.device("meta"):
        model = training.model()
    wide = one_of_several(model, training.batch(0))
    cluster = replace(NOMINAL_CPU, gather_share=gather_share)
    request = Request(2, training.samples, dp=1, tp=2, pp=1, overlap=0)
    assert choose(request, lambda _: wide, cluster).plan.sequence_parallel is (gather_share == 1.0)


def test_sequences_are_split_where_the_memory_asks_for_it() -> None:
    request = Request(2, BATCH_SIZE, dp=1, tp=2, pp=1, recompute="none")
    slow = replace(NOMINAL_CPU, link_latency_s=1.0)  # the additional collectives do not pay
    plain = choose(request, recording, slow)
    assert not plain.plan.sequence_parallel
    assert plain.prediction is not None
    tight = replace(slow, memory_bytes=plain.prediction.peak_bytes[0] - 1)
    best = choose(request, recording, tight)
    assert best.plan.sequence_parallel
    assert best.prediction is not None
    assert best.prediction.peak_bytes[0] < plain.prediction.peak_bytes[0]
    kept = choose(replace(request, sequence_parallel=False), recording, tight)
    assert not kept.plan.sequence_parallel


def test_the_users_choices_are_kept() -> None:
    request = Request(2, BATCH_SIZE, pp=2, micro_batches=4, schedule="gpipe", recompute="full")
    best = choose(request, recording, NOMINAL_CPU)
    assert (best.plan.pp, best.plan.micro_batches, best.plan.schedule, best.plan.recompute) == (
        2,
        4,
        "gpipe",
        "full",
    )
    assert best.plan.batch_size == BATCH_SIZE


def test_an_order_is_made_for_the_stages_and_the_memory() -> None:
    request = Request(4, BATCH_SIZE, dp=1, tp=1, pp=4, micro_batches=8)
    best = choose(request, recording, NOMINAL_CPU)
    plain = choose(replace(request, schedule="1f1b"), recording, NOMINAL_CPU)
    assert best.prediction is not None
    assert plain.prediction is not None
    assert best.plan.schedule == "auto"
    assert len(best.plan.order) == 4
    assert best.prediction.step_s < 0.9 * plain.prediction.step_s
    assert {a.kind for p in best.programs() for a in p.actions} >= {ActionKind.WEIGHT_GRAD}
    tight = replace(NOMINAL_CPU, memory_bytes=int(0.8 * max(plain.prediction.peak_bytes)))
    less = choose(request, recording, tight)
    assert less.plan.recompute in ("solved", "stage", "budget")
    assert less.prediction is not None
    assert max(less.prediction.peak_bytes) <= tight.memory_bytes
    never = choose(replace(request, recompute="none"), recording, tight)
    assert never.plan.recompute == "none"


def test_of_orders_as_short_the_one_that_keeps_less_is_taken() -> None:
    request = Request(4, BATCH_SIZE, dp=1, tp=1, pp=4, micro_batches=8)

    def peaks(cluster: Cluster) -> tuple[int, int]:
        cluster = cluster.with_hardware(4)
        plain = plan_layout(request, recording, cluster)  # 1F1B
        found = improve(request, plain, recording, cluster)
        first, second = plain.prediction, found.prediction
        assert first is not None
        assert second is not None
        return max(first.peak_bytes), max(second.peak_bytes)

    # All orders of work take as long: nothing waits for messages.
    one_core = replace(
        NOMINAL_CPU, sharing=Sharing((1.0,), 4), link_latency_s=0.0, link_bytes_per_s=1e15
    )
    least, made = peaks(one_core)
    assert made <= SAME * least < 1.1 * least < peaks(NOMINAL_CPU)[1]


def test_each_stage_keeps_as_much_as_its_memory_lets_it() -> None:
    request = Request(4, BATCH_SIZE, dp=1, tp=1, pp=4, micro_batches=8, schedule="1f1b")
    plain = choose(request, recording, NOMINAL_CPU)
    assert plain.prediction is not None
    tight = replace(NOMINAL_CPU, memory_bytes=int(0.8 * max(plain.prediction.peak_bytes)))
    best = choose(request, recording, tight)
    full = choose(replace(request, recompute="full"), recording, tight)
    assert best.plan.recompute == "budget"
    assert "again" in best.plan.kept_blocks[0] or "products" in best.plan.kept_blocks[0]
    assert best.plan.kept_blocks[-1].endswith("kept")
    assert best.prediction is not None
    assert full.prediction is not None
    assert max(best.prediction.peak_bytes) <= tight.memory_bytes
    assert plain.prediction.step_s < best.prediction.step_s < full.prediction.step_s


def test_each_rank_is_held_against_the_memory_of_its_own_device() -> None:
    request = Request(4, BATCH_SIZE, dp=1, tp=1, pp=4, micro_batches=8, schedule="1f1b")
    roomy = NOMINAL_CPU.described(4)
    plain = choose(request, recording, roomy.flat("float32"))
    assert plain.prediction is not None
    assert plain.plan.recompute == "none"
    (device,) = {n.device for n in roomy.nodes}
    small = bare(device, int(0.85 * plain.prediction.peak_bytes[1]))
    mixed = Hardware("mixed", (Nodes(device, 1), Nodes(small, 1), Nodes(device, 2)), roomy.links)
    best = choose(request, recording, mixed.flat("float32"))
    assert best.plan.stages == plain.plan.stages
    assert best.plan.recompute == "budget"
    # Products are kept elsewhere only where making the rest again costs nothing.
    assert ["again" in kept for kept in best.plan.kept_blocks] == [False, True, False, False]
    assert best.prediction is not None
    own, whole = best.prediction.peak_bytes, plain.prediction.peak_bytes
    assert own[1] <= small.memory_bytes < own[0]
    assert own[1] < whole[1]


def test_an_order_of_the_users_own_is_planned() -> None:
    text = "0F0 0F1 0R0 0B0 0R1 0B1; 1F0 1I0 1F1 1I1 1W0 1W1"
    request = with_schedule(Request(2, BATCH_SIZE, pp=2, micro_batches=2, schedule=text))
    best = choose(request, recording, NOMINAL_CPU)
    assert (best.plan.schedule, best.plan.recompute) == ("custom", "stage")
    assert best.stage_graphs(0, 0).recompute is not None
    assert best.stage_graphs(1, 0).recompute is None
    with pytest.raises(ConfigError, match="an order of 2 micro-batches on 2 ranks"):
        choose(replace(request, micro_batches=4), recording, NOMINAL_CPU)


def test_the_first_error_is_raised_where_no_mesh_works() -> None:
    with pytest.raises(CutError, match="at most"):
        choose(Request(10_000, BATCH_SIZE, pp=10_000), recording, NOMINAL_CPU)
    with pytest.raises(ShardError, match="tp=4096"):
        choose(Request(4096, BATCH_SIZE, tp=4096), recording, NOMINAL_CPU)


# --- sharded state ---------------------------------------------------------------------------

SHARDED = Request(4, BATCH_SIZE, dp=4, tp=1, pp=1, micro_batches=4)


def peak_bytes(state_shards: object, cluster: Cluster = NOMINAL_CPU, **fixed: object) -> int:
    request = replace(SHARDED, state_shards=state_shards, recompute="none", **fixed)  # type: ignore[arg-type]
    best = choose(request, recording, cluster)
    assert best.prediction is not None
    return max(best.prediction.peak_bytes)


def test_state_stays_whole_where_nothing_is_waited_for() -> None:
    fast = replace(NOMINAL_CPU, link_latency_s=0.0, link_bytes_per_s=1e15)
    assert set(choose(SHARDED, recording, fast).plan.state_shards) <= {StateShards()}


def test_state_is_sharded_before_anything_is_recomputed() -> None:
    whole, zero_1 = peak_bytes("zero-0"), peak_bytes("zero-1")
    assert zero_1 < whole
    tight = replace(NOMINAL_CPU, memory_bytes=zero_1)
    best = choose(SHARDED, recording, tight)
    assert best.plan.recompute == "none"
    (shards,) = best.plan.state_shards
    assert shards.optimizer == 4
    assert best.prediction is not None
    assert max(best.prediction.peak_bytes) <= zero_1
    # It is the one that waits least of all that fit.
    for other in lattice(4):
        made = replace(best, plan=replace(best.plan, state_shards=(other,)))
        found, _ = predict(made, tight, dp_rank=0)
        if max(found.peak_bytes) <= tight.memory_bytes:
            assert found.exposed_s[0] >= best.prediction.exposed_s[0] - 1e-9


def test_recomputation_comes_after_sharding() -> None:
    least = min(peak_bytes((s.parameters, s.gradients, s.optimizer)) for s in lattice(4))
    tight = replace(NOMINAL_CPU, memory_bytes=least - 1)
    best = choose(SHARDED, recording, tight)
    assert best.plan.recompute != "none"
    assert best.plan.state_shards != ()
    given = choose(replace(SHARDED, state_shards=(1, 1, 1)), recording, tight)
    assert given.plan.state_shards == ()


def test_auto_takes_what_waits_least() -> None:
    request = replace(SHARDED, state_shards="auto")
    # Compute hides everything, or nothing: the latency alone counts, and then the bytes.
    slow = replace(NOMINAL_CPU, link_latency_s=0.0, link_bytes_per_s=1e5)
    best = choose(request, recording, slow)
    assert best.prediction is not None
    exposed_s = {}
    for shards in lattice(4):
        made = replace(best, plan=replace(best.plan, state_shards=(shards,)))
        exposed_s[shards] = predict(made, slow, dp_rank=0)[0].exposed_s[0]
    assert best.prediction.exposed_s[0] == pytest.approx(min(exposed_s.values()))
    assert max(exposed_s.values()) > 1.1 * min(exposed_s.values())
    one = choose(replace(request, world_size=1, dp=1), recording, slow)
    assert one.plan.state_shards == ()


@small_buckets()
def test_each_stage_has_its_own_shards() -> None:
    """What one stage's memory asks for is no reason to shard another's state alike."""
    request = replace(SHARDED, dp=2, pp=2, schedule="1f1b", recompute="none", state_shards="auto")
    roomy = choose(request, recording, NOMINAL_CPU)
    peaks = {}
    for shards in lattice(2):
        made = replace(roomy, plan=replace(roomy.plan, state_shards=(shards,) * 2))
        peaks[shards] = predict(made, NOMINAL_CPU, dp_rank=0)[0].peak_bytes
    # One rank has not the bytes for the fastest, and the other one has.
    full, other = sorted((0, 1), key=lambda rank: -peaks[roomy.plan.state_shards[rank]][rank])
    limit = peaks[roomy.plan.state_shards[full]][full] - 1
    assert min(peak[full] for peak in peaks.values()) <= limit
    assert peaks[roomy.plan.state_shards[other]][other] <= limit
    best = choose(request, recording, replace(NOMINAL_CPU, memory_bytes=limit))
    assert peaks[best.plan.state_shards[full]][full] <= limit
    assert best.plan.state_shards[full] != roomy.plan.state_shards[full]
    assert best.plan.state_shards[other] == roomy.plan.state_shards[other]


@pytest.mark.parametrize("fixed", [{}, {"dp": 1, "tp": 1, "pp": 1}])
def test_machines_without_products_of_float8_are_refused(fixed: dict[str, int]) -> None:
    request = Request(1, BATCH_SIZE, precision=NAMED["fp8-mixed"], **fixed)
    for ask in (choose, compare):
        with pytest.raises(ConfigError, match=r"a100-80 has no products of float8.*bf16-mixed"):
            ask(request, recording, hardware_for("a100-80", 1).flat())
