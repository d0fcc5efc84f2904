"""The shape of a trace: slices, names, arrows."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from merakc.ir.costs import CostTable, StageCost
from merakc.ir.program import ActionKind, CollectiveEvent, Event, Mesh, Transfer
from merakc.passes.programs.schedule import build_programs
from merakc.report.trace import write_trace
from merakc.schedules.registry import make_schedule
from merakc.simulation.simulate import simulate

STAGES, MICRO_BATCHES = 3, 4


def _events(p2p_latency_s: float = 1e-5) -> tuple[Event, ...]:
    transfers = [Transfer(f"h{s}", s, s + 1, 1000, True) for s in range(STAGES - 1)]
    programs = build_programs(
        Mesh(pp=STAGES), make_schedule("1f1b", STAGES, MICRO_BATCHES), transfers
    )
    stage = StageCost(1e-3 / 3, 2e-3 / 3, reduce_s=1e-3 / 7)
    return simulate(programs, CostTable((stage,) * STAGES, p2p_latency_s, 1e9)).events


def _write(path: Path, *timelines: tuple[Event, ...]) -> list[dict[str, Any]]:
    write_trace(timelines[0], path, measured=timelines[1] if len(timelines) > 1 else ())
    body = json.loads(path.read_text())
    assert body.keys() == {"traceEvents", "displayTimeUnit"}
    found: list[dict[str, Any]] = body["traceEvents"]
    return found


def _of(trace: list[dict[str, Any]], *phases: str) -> list[dict[str, Any]]:
    return [e for e in trace if e["ph"] in phases]


def test_every_event_is_a_complete_slice_in_microseconds(tmp_path: Path) -> None:
    events = _events()
    trace = _write(tmp_path / "t.json", events)
    slices = _of(trace, "X")
    assert sorted(s["name"] for s in slices) == sorted(e.label for e in events)
    for found in slices:
        assert found.keys() >= {"pid", "tid", "name", "cat", "cname", "ts", "dur", "args"}
        assert found["dur"] >= 0
    first = next(s for s in slices if s["name"] == "0F1")
    assert (first["ts"], first["dur"]) == (333.333, 333.334)
    assert first["cat"] == "forward"
    assert first["args"] == {"rank": 0, "stage": 0, "micro_batch": 1}


def test_slices_of_a_thread_do_not_overlap(tmp_path: Path) -> None:
    slices = _of(_write(tmp_path / "t.json", _events()), "X")
    for tid in {s["tid"] for s in slices}:
        mine = [s for s in slices if s["tid"] == tid]
        for one, two in pairwise(mine):
            assert round(1000 * (one["ts"] + one["dur"])) <= round(1000 * two["ts"])


def test_processes_and_threads_are_named(tmp_path: Path) -> None:
    trace = _write(tmp_path / "t.json", _events(), _events())
    names = {(e["name"], e["pid"], e["tid"]): e["args"] for e in _of(trace, "M")}
    assert names["process_name", 1, 0] == {"name": "simulated"}
    assert names["process_name", 2, 0] == {"name": "measured"}
    assert names["thread_name", 2, 2_000_001] == {"name": "rank 1, stage 1"}
    threads = {(e["pid"], e["tid"]) for e in _of(trace, "X")}
    assert threads == {(p, t) for kind, p, t in names if kind == "thread_name"}
    assert len(threads) == 2 * STAGES


@pytest.mark.parametrize("p2p_latency_s", [0.0, 1e-5, 1e-2])
def test_arrows_lead_from_each_send_to_its_receive(tmp_path: Path, p2p_latency_s: float) -> None:
    events = _events(p2p_latency_s)
    trace = _write(tmp_path / "t.json", events, events)
    starts = {e["id"]: e for e in _of(trace, "s")}
    ends = {e["id"]: e for e in _of(trace, "f")}
    assert starts.keys() == ends.keys()
    assert len(starts) == len(_of(trace, "s")) == 2 * 2 * (STAGES - 1) * MICRO_BATCHES
    for number, start in starts.items():
        end = ends[number]
        assert end["bp"] == "e"
        assert start["pid"] == end["pid"]
        assert start["ts"] <= end["ts"]
        send, receive = (_slice_before(trace, e)["name"] for e in (start, end))
        rank, peer = start["tid"] % 1_000_000, end["tid"] % 1_000_000
        content = send.split()[2]
        assert send.split()[0] == "send"
        assert send.endswith(f"{content} -> {peer}")
        assert receive.endswith(f"{content} <- {rank}")
        assert send.split()[1][1:] == receive.split()[1][1:]  # phase and micro-batch


def _slice_before(trace: list[dict[str, Any]], flow: dict[str, Any]) -> dict[str, Any]:
    """The slice to which the tools bind an arrow's end: the one opened last on its thread."""
    before = trace[: trace.index(flow)]
    return [e for e in before if e["ph"] == "X" and e["tid"] == flow["tid"]][-1]


def test_message_whose_other_end_is_missing_has_no_arrow(tmp_path: Path) -> None:
    events = (
        Event(0, "send 0F0 h -> 1", ActionKind.SEND, 0.0, 0.0),
        Event(1, "recv 1F1 h <- 0", ActionKind.RECV, 0.0, 1.0),
    )
    assert not _of(_write(tmp_path / "t.json", events), "s", "f")


def test_memory_is_a_track_for_each_rank(tmp_path: Path) -> None:
    schedule = make_schedule("zb-h1", 2, 2, recompute="full")
    programs = build_programs(Mesh(pp=2), schedule, [Transfer("h", 0, 1, 8, True)])
    stage = StageCost(1.0, 2.0, 1.0, 1.0, 1.0, saved_bytes=100, checkpoint_bytes=10,
                      static_bytes=1000)  # fmt: skip
    found = simulate(programs, CostTable((stage,) * 2, 0.0, float("inf")))
    write_trace(found.events, tmp_path / "t.json", memory=found.memory)
    trace = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    counters = _of(trace, "C")
    for rank in range(2):
        own = [c for c in counters if c["name"] == f"live bytes of rank {rank}"]
        assert [c["ts"] for c in own] == sorted(c["ts"] for c in own)
        assert max(c["args"]["bytes"] for c in own) == found.peak_bytes[rank]
        assert own[-1]["args"]["bytes"] == 1000
    assert "recompute" in {s["cat"] for s in _of(trace, "X")}


def test_collectives_over_dp_are_a_process_of_their_own(tmp_path: Path) -> None:
    events = (Event(0, "0F0", ActionKind.FORWARD, 0.0, 2.0),)
    collectives = (
        Event(0, "refresh 0:0", ActionKind.GATHER, 0.0, 1.0),
        Event(0, "reduce 0:0", ActionKind.REDUCE, 1.0, 3.0),
    )
    write_trace(events, tmp_path / "t.json", collectives=collectives)
    trace = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in trace if e["name"] == "process_name"}
    slices = {s["name"]: (names[s["pid"]], s["cat"]) for s in _of(trace, "X")}
    assert slices == {
        "0F0": ("simulated", "forward"),
        "refresh 0:0": ("simulated, over dp", "gather"),
        "reduce 0:0": ("simulated, over dp", "reduce"),
    }


def test_collectives_of_computes_have_lanes_below_their_rank(tmp_path: Path) -> None:
    events = (
        Event(0, "0F0", ActionKind.FORWARD, 0.0, 4.0),
        Event(1, "0F0", ActionKind.FORWARD, 0.0, 4.0),
    )
    inside = (
        CollectiveEvent(0, "all_reduce", "tp", 8, 0.0, 0.0, 2.0, 1.5, 2.0),
        CollectiveEvent(0, "all_gather", "tp", 16, 1.0, 1.0, 3.0, 3.0, 3.0),  # the first still runs
        CollectiveEvent(0, "all_reduce", "tp", 8, 2.0, 2.0, 2.5, 2.5, 2.5),
    )
    write_trace(events, tmp_path / "t.json", inside=inside)
    trace = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in trace if e["name"] == "thread_name"}
    order = {e["tid"]: e["args"]["sort_index"] for e in trace if e["name"] == "thread_sort_index"}
    assert [names[tid] for tid in sorted(order, key=lambda tid: int(order[tid]))] == [
        "rank 0, stage 0", "rank 0, tp", "rank 0, tp (2)", "rank 1, stage 0",
    ]  # fmt: skip
    slices = [(names[s["tid"]], s["name"], s["ts"], s["dur"]) for s in _of(trace, "X")]
    assert slices == [
        ("rank 0, stage 0", "0F0", 0.0, 4e6),
        ("rank 0, tp", "all_reduce", 0.0, 2e6),
        ("rank 1, stage 0", "0F0", 0.0, 4e6),
        ("rank 0, tp (2)", "all_gather", 1e6, 2e6),
        ("rank 0, stage 0", "wait for all_reduce", 1.5e6, 0.5e6),
        ("rank 0, tp", "all_reduce", 2e6, 0.5e6),
    ]
    first = next(s for s in _of(trace, "X") if s["cat"] == "collective")
    assert first["args"] == {"rank": 0, "axis": "tp", "bytes": 8, "hidden_us": 1.5e6}
