"""How much waits on the host: as much as is asked for, or the least with which ranks fit."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from benchmarks.models import MODELS
from merakc.errors import ConfigError
from merakc.frontend.record import Recording
from merakc.ir.plan_file import Prediction
from merakc.lowering.lowered import Lowered
from merakc.lowering.predict import predict
from merakc.machines.cluster import NOMINAL_CPU, Cluster
from merakc.machines.links import Host
from merakc.planner.offload import with_moves
from merakc.planner.request import Request
from merakc.planner.search import plan_layout
from tests.recorded import one_of_several

REQUEST = Request(2, 32, dp=1, tp=1, pp=2, micro_batches=4, schedule="1f1b", recompute="none")


@cache
def recording(samples: int) -> Recording:
    case = MODELS["gpt2"]
    return one_of_several(case.model(), case.batch(samples))


def planned(offload: str, cluster: Cluster = NOMINAL_CPU, recompute: str = "none") -> Lowered:
    return plan_layout(replace(REQUEST, offload=offload, recompute=recompute), recording, cluster)


def predicted(lowered: Lowered) -> Prediction:
    assert lowered.prediction is not None
    return lowered.prediction


def test_as_much_moves_as_is_asked_for() -> None:
    whole = planned("activations")
    assert whole.plan.host_activations == (1.0, 1.0)
    assert whole.plan.offload == "activations"
    assert predicted(whole) == predict(whole, NOMINAL_CPU, dp_rank=0)[0]
    most = max(predicted(whole).host_bytes) // 2
    half = planned(f"activations, {most / 1024} KiB")
    for rank, share in enumerate(half.plan.host_activations):
        assert 0 < share <= 1
        assert predicted(half).host_bytes[rank] <= most
    assert max(predicted(half).host_bytes) > 0.9 * most
    assert max(predicted(half).peak_bytes) > max(predicted(whole).peak_bytes)


def test_no_more_moves_than_has_no_room() -> None:
    kept = predicted(planned("none")).peak_bytes
    least = predicted(planned("activations")).peak_bytes
    room = replace(NOMINAL_CPU, memory_bytes=(max(kept) + 2 * max(least)) // 3)
    made = planned("auto", room)
    peaks, shares = predicted(made).peak_bytes, made.plan.host_activations
    assert 0.95 * room.memory_bytes < max(peaks) <= room.memory_bytes
    assert [share > 0 for share in shares] == [peak > room.memory_bytes for peak in kept]
    assert planned("auto").plan.host_activations == ()


def test_the_cheaper_of_moving_and_recomputing_is_chosen() -> None:
    room = replace(NOMINAL_CPU, memory_bytes=int(0.85 * max(predicted(planned("none")).peak_bytes)))
    moving, again = planned("auto", room), planned("none", room, recompute="auto")
    assert max(*predicted(moving).peak_bytes, *predicted(again).peak_bytes) <= room.memory_bytes
    best = planned("auto", room, recompute="auto")
    of_each = [predicted(one) for one in (best, moving, again)]
    seconds = [found.step_s + max(found.host_s, default=0.0) for found in of_each]
    assert seconds[0] == min(seconds[1:])
    slow = replace(room, host=Host(1 << 33, 1e10, 1e4, 1e4))
    assert planned("auto", slow, recompute="auto").plan == again.plan


def test_what_cannot_be_is_refused() -> None:
    lowered = planned("none")
    bare = replace(NOMINAL_CPU, host=None)
    with pytest.raises(ConfigError, match=r"does not say what memory .* \[nodes.host\]"):
        with_moves(lowered, "activations", bare)
    assert with_moves(lowered, "auto", bare) is lowered
    by_actions = replace(lowered, plan=replace(lowered.plan, recompute="stage"))
    with pytest.raises(ConfigError, match=r"what the schedule makes again .* ask for recompute"):
        with_moves(by_actions, "activations", NOMINAL_CPU)
    with pytest.raises(ConfigError, match=r"a device may use 8\.00 GiB"):
        with_moves(lowered, "activations, 9 GiB", NOMINAL_CPU)
