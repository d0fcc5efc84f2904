"""Layouts compared by pieces: the best is that of trying all."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from functools import cache
from itertools import islice

import pytest
import torch
from torch import nn

from merakc.costs.ranks import rank_devices
from merakc.costs.state import MIXED
from merakc.errors import CutError
from merakc.frontend.record import Recording
from merakc.ir.strategy import Form
from merakc.machines.cluster import NOMINAL_GPU, Cluster, Hardware, Nodes
from merakc.machines.cluster_files import preset
from merakc.planner import candidates
from merakc.planner.candidates import Candidates, find_candidates
from merakc.planner.offline import loses_by
from merakc.planner.piece_table import PieceTable
from merakc.planner.pricing import Candidate
from merakc.planner.request import Request
from tests.machines.bare import bare
from tests.planner.test_piece_table import llama
from tests.recorded import one_of_several

BATCH = 16
TABLE = PieceTable(llama, NOMINAL_GPU)
HARDWARE = preset("a100-40", 1)


def find(request: Request, hardware: Hardware = HARDWARE) -> Candidates:
    found = Candidates(TABLE)
    find_candidates(found, replace(request, total_batch_size=BATCH), hardware, MIXED)
    return found


def with_memory(memory_bytes: int) -> Hardware:
    nodes = tuple(replace(n, device=bare(n.device, memory_bytes)) for n in HARDWARE.nodes)
    return replace(HARDWARE, nodes=nodes)


@pytest.mark.parametrize("memory_bytes", [1 << 34, 1 << 20])
def test_the_best_is_that_of_trying_all(memory_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    hardware = with_memory(memory_bytes)
    found = find(Request(8, 0), hardware)
    monkeypatch.setattr(candidates, "RUNNERS_UP", 10**6)
    everything = find(Request(8, 0), hardware)
    assert found.looked_at < everything.looked_at
    assert found.ranked[0].estimate.step_s == everything.ranked[0].estimate.step_s
    steps = [c.estimate.step_s for c in everything.ranked]
    assert steps == sorted(steps)
    assert all(c.peak_bytes <= memory_bytes for c in everything.ranked)
    degrees = {(d.dp, d.tp, d.pp) for c in everything.ranked for d in (c.strategy,)}
    assert degrees == {(8 // tp // pp, tp, pp) for tp in (1, 2, 4) for pp in (1, 2, 4, 8)
                       if tp * pp <= 8 and pp < 7} | set(degrees)  # fmt: skip


@pytest.mark.parametrize("request_", [Request(8, 0), Request(8, 0, tp=1)])
def test_no_more_are_priced_than_are_asked_for(request_: Request) -> None:
    """Those that are certain to be the fastest at once, and all others in their order later."""
    found = find(request_)
    assert found.left is not None
    turned = sum(one.strategy.inner == "dp" for one in found.ranked)
    assert len(found.ranked) - turned > candidates.RUNNERS_UP
    count, best_s = len(found.ranked), found.ranked[0].sample_s
    (first, second) = islice(found.in_order(lambda: (0.0, 0.0)), 2)
    assert [first, second] == found.ranked[:2]
    assert len(found.ranked) == count
    near = [*found.in_order(lambda: (1.5 * best_s, math.inf))]
    steps = [one.sample_s for one in near if one.sample_s < 1.5 * best_s]
    assert steps == sorted(steps)
    every = [*found.in_order(lambda: (math.inf, math.inf))]
    assert [one.sample_s for one in every] == sorted(one.sample_s for one in every)
    assert steps == [one.sample_s for one in every if one.sample_s < 1.5 * best_s]
    assert len(every) > count
    assert not found.left.goes_on(found, math.inf)


def mixed(memory_bytes: int = 1 << 34) -> Hardware:
    """Half of the devices take four times as long, and have less memory."""
    (nodes,) = HARDWARE.nodes
    fast = bare(nodes.device, 1 << 34)
    slow = replace(
        fast, name="slow", launch_s=4 * fast.launch_s, bytes_per_s=fast.bytes_per_s / 4,
        peak_flops_per_s={"float32": 1e12}, memory_bytes=memory_bytes,
    )  # fmt: skip
    return replace(HARDWARE, nodes=(Nodes(fast, 4), Nodes(slow, 4)))


@pytest.mark.parametrize("memory_bytes", [1 << 34, 1 << 19])
def test_the_best_on_unlike_devices_is_that_of_trying_all(
    memory_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    hardware = mixed(memory_bytes)
    request = Request(8, 0, tp=1)
    found = find(request, hardware)
    monkeypatch.setattr(candidates, "RUNNERS_UP", 10**6)
    everything = find(request, hardware)
    assert found.looked_at < everything.looked_at
    assert found.ranked[0].estimate.step_s == everything.ranked[0].estimate.step_s
    assert {c.strategy.inner for c in everything.ranked} == {"pp", "dp"}
    for one in everything.ranked:
        devices = rank_devices(hardware, one.strategy.mesh)
        own = zip(one.estimate.peak_bytes, devices, strict=True)
        assert all(peak <= device.memory_bytes for peak, device in own)


def test_unlike_devices_are_used_better_than_the_slowest_alone() -> None:
    hardware = mixed()
    slowest = replace(hardware, nodes=(Nodes(hardware.slowest, 8),))
    request = Request(8, 0, tp=1)
    (best, *_), (slow, *_) = find(request, hardware).ranked, find(request, slowest).ranked
    assert best.strategy.pp > 1
    assert best.estimate.step_s < 0.9 * slow.estimate.step_s


def test_memory_asks_for_shards_or_recomputation() -> None:
    roomy = find(Request(8, 0, dp=8, state_shards="zero-0")).ranked[0]
    limit = int(0.9 * roomy.peak_bytes)
    tight = find(Request(8, 0, dp=8), with_memory(limit)).ranked[0]
    assert tight.peak_bytes <= limit
    assert tight.strategy.shards(0).optimizer > 1 or tight.strategy.recompute == "solved"
    assert tight.estimate.step_s >= roomy.estimate.step_s


class Tanhs(nn.Module):
    """A product behind so many other calls, and a loss."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count, self.first = count, nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The mean is over the samples."""
        for _ in range(self.count):
            x = torch.tanh(x)
        return self.first(x).square().mean()


def test_no_more_stages_are_looked_at_than_a_micro_batch_of_its_size_has_pieces() -> None:
    counts = {1: 12, 2: 2, 4: 6}

    def record(samples: int) -> Recording:
        return one_of_several(Tanhs(counts[samples]), {"x": torch.zeros(samples, 8)})

    found = Candidates(PieceTable(cache(record), NOMINAL_GPU))
    find_candidates(found, Request(2, 0, total_batch_size=4, pp=2), HARDWARE, MIXED)
    most = {n: len(found.table.pieces(Form(1), n)) for n in counts}
    assert most[2] < 8 <= most[1]  # 4 stages on each of 2 ranks are 8
    stages = {(c.strategy.samples, c.strategy.stage_count) for c in found.ranked}
    assert (1, 8) in stages
    assert all(count <= most[samples] for samples, count in stages)


def test_what_is_fixed_stays() -> None:
    request = Request(
        8, 0, dp=2, tp=2, pp=2, micro_batches=4, schedule="zb-h1", sequence_parallel=True,
        state_shards="zero-1",
    )  # fmt: skip
    (best, *_) = find(request).ranked
    d = best.strategy
    assert (d.dp, d.tp, d.pp, d.micro_batches, d.schedule) == (2, 2, 2, 4, "zb-h1")
    assert best.strategy.samples == 2
    assert best.strategy.sequence_parallel
    assert str(best.strategy.shards(0)) == "1, 1, 2"


def test_seconds_add_up_and_say_what_loses() -> None:
    best, *others = find(Request(8, 0)).ranked
    for one in (best, *others):
        assert sum(one.seconds.values()) == pytest.approx(one.estimate.step_s)
    assert any("idle pipeline ranks" in loses_by(one, best) for one in others)
    assert all(re.fullmatch(r"[a-z ]+ \+[\d.]+ m?u?s", loses_by(one, best)) for one in others)


def test_nothing_fits() -> None:
    found = find(Request(8, 0), with_memory(1000))
    assert len(found.nearest) == found.looked_at
    with pytest.raises(CutError, match="no degrees that divide 8 ranks and 16 samples"):
        find(Request(8, 0, pp=8, dp=8))


def test_a_cluster_of_which_nothing_is_known_is_one_node() -> None:
    assert isinstance(NOMINAL_GPU, Cluster)
    found = find(Request(8, 0), NOMINAL_GPU.described(8)).ranked
    assert isinstance(found[0], Candidate)
