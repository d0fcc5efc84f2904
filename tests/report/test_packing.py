"""Events come back from the text that a plan's file holds."""

from __future__ import annotations

import base64
import json
import zlib
from dataclasses import replace
from typing import Any

import pytest

from merakc.errors import PlanError
from merakc.ir.program import ActionKind, Event, Mesh
from merakc.ir.report import Timeline
from merakc.lowering.predict import predict
from merakc.report.packing import TICKS, Moments, middle, pack, placed, unpack, without
from merakc.simulation.simulate import Simulation
from tests.report.made import SLOW, lowered


def long_step(micro_batches: int) -> Simulation:
    """A rank that runs one micro-batch after the other."""
    events = []
    for k in range(micro_batches):
        kind = ActionKind.FORWARD if k % 2 == 0 else ActionKind.BACKWARD
        events.append(Event(0, f"0{kind}{k // 2}", kind, k * 1.0, k + 1.0))
    return Simulation(float(micro_batches), tuple(events), (1.0,), 0.0, ())


def close(found: tuple[Event, ...], given: tuple[Event, ...], step_s: float) -> bool:
    same = [(e.rank, e.label, e.kind) for e in found] == [(e.rank, e.label, e.kind) for e in given]
    pairs = zip(found, given, strict=True)
    error_s = max(max(abs(f.start_s - g.start_s), abs(f.end_s - g.end_s)) for f, g in pairs)
    return same and error_s <= step_s / TICKS


def test_a_step_comes_back() -> None:
    _, simulation = predict(lowered(Mesh(2, 2, 2), shards=(2, 2, 2)), SLOW, dp_rank=0)
    timeline = pack(simulation)
    assert timeline.left_out_s is None
    found = unpack(timeline)
    assert found.step_s == simulation.step_s
    assert close(found.events, simulation.events, found.step_s)
    assert simulation.collectives
    assert close(found.collectives, simulation.collectives, found.step_s)
    assert simulation.waits
    assert close(found.waits, simulation.waits, found.step_s)
    bytes_ = [(m.rank, m.live_bytes) for m in simulation.memory]
    assert [(m.rank, m.live_bytes) for m in found.memory] == bytes_


def test_ranks_take_other_numbers_and_messages_follow() -> None:
    _, simulation = predict(lowered(Mesh(1, 2, 2)), SLOW, dp_rank=0)
    assert {e.rank for e in simulation.events} == {0, 2}
    found = placed(simulation, {0: 0, 2: 1})
    assert {e.rank for e in found.events} == {m.rank for m in found.memory} == {0, 1}
    peers = {e.rank: e.label[-1] for e in found.events if e.kind is ActionKind.SEND}
    assert peers == {0: "1", 1: "0"}
    assert [e.start_s for e in found.events] == [e.start_s for e in simulation.events]


def test_neighbours_do_not_overlap() -> None:
    _, simulation = predict(lowered(Mesh(pp=2)), SLOW, dp_rank=0)
    found = unpack(pack(simulation)).events
    ends: dict[int, float] = {}
    for event in found:
        assert event.start_s >= ends.get(event.rank, 0.0) - 1e-15
        ends[event.rank] = event.end_s


def test_of_a_long_step_the_middle_is_left_out() -> None:
    timeline = pack(long_step(1000), most=100)
    assert timeline.left_out_s is not None
    first_s, last_s = timeline.left_out_s
    assert 0 < first_s < last_s < 1000
    found = unpack(timeline).events
    assert 90 <= len(found) <= 110
    assert (found[0].label, found[-1].label) == ("0F0", "0B499")
    assert not [e for e in found if first_s < e.start_s < last_s]


def test_what_is_short_enough_is_whole() -> None:
    assert middle(long_step(10).events, 10) is None
    assert middle(long_step(11).events, 10) is not None


def test_collectives_and_memory_are_left_out_with_the_events() -> None:
    _, simulation = predict(lowered(Mesh(2, 1, 2), shards=(2, 2, 2)), SLOW, dp_rank=0)
    step_s = simulation.step_s
    cut = step_s * 0.25, step_s * 0.75
    whole = Moments(step_s, simulation.events, simulation.collectives, simulation.memory)
    found = without(whole, cut)
    assert 0 < len(found.events) < len(whole.events)
    assert 0 < len(found.memory) < len(whole.memory)
    assert all(e.end_s <= cut[0] or e.start_s >= cut[1] for e in found.collectives)


@pytest.mark.parametrize("count", [20_000, 100_000])
def test_a_file_holds_it_whatever_the_length(count: int) -> None:
    timeline = pack(long_step(count))
    assert len(timeline.packed) < 200_000
    assert unpack(timeline).step_s == replace(long_step(2), step_s=float(count)).step_s


def _packed(text: bytes) -> Timeline:
    return Timeline(base64.b64encode(zlib.compress(text)).decode())


GOOD: dict[str, Any] = {
    "step_s": 1.0,
    "events": [[0, ["0F0"], ["F"], [0], [1]]],
    "collectives": [],
    "memory": [],
}


@pytest.mark.parametrize(
    "change",
    [
        {"step_s": -1.0},
        {"step_s": "x"},
        {"events": [[0, ["0F0"], ["X"], [0], [1]]]},
        {"events": [[0, ["0F0"], ["F"], [0, 1], [1]]]},
        {"events": [[0, ["0F0"], ["F"], [0], [-1]]]},
        {"events": [[0, ["0F0"], ["F"], [-5], [1]]]},
        {"events": [[0, ["forward"], ["F"], [0], [1]]]},
        {"events": [[0, ["0F" + "1" * 5000], ["F"], [0], [1]]]},
        {"collectives": [[0, ["send 2"], ["send"], [0], [1]]]},
        {"memory": [[0, [1], []]]},
        {"memory": 3},
    ],
)
def test_a_damaged_timeline_is_refused(change: dict[str, Any]) -> None:
    assert unpack(_packed(json.dumps(GOOD).encode())).step_s == 1.0
    with pytest.raises(PlanError, match=r"timeline cannot be read: .*; make the plan again"):
        unpack(_packed(json.dumps({**GOOD, **change}).encode()))


@pytest.mark.parametrize("text", [b" " * (1 << 25), b"[" * 1000, b"[]", b"\xff", b""])
def test_unpacking_a_timeline_is_bounded(text: bytes) -> None:
    with pytest.raises(PlanError, match="timeline cannot be read"):
        unpack(_packed(text))
    with pytest.raises(PlanError, match="timeline cannot be read"):
        unpack(Timeline(text.decode("latin-1")))
