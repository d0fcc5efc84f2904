"""Timelines for ui.perfetto.dev and chrome://tracing, in the Trace Event Format."""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from merakc.ir.program import ActionKind, CollectiveEvent, Event
from merakc.report.charts.labels import ComputeLabel, MessageLabel, parse_label
from merakc.simulation.simulate import MemorySample

_TraceEvent = dict[str, Any]

# A slice's category, and its colour by chrome://tracing's names; Perfetto's follows from its name.
_KINDS = {
    ActionKind.FORWARD: ("forward", "thread_state_runnable"),
    ActionKind.BACKWARD: ("backward", "thread_state_iowait"),
    ActionKind.INPUT_GRAD: ("input_grad", "thread_state_iowait"),
    ActionKind.WEIGHT_GRAD: ("weight_grad", "thread_state_running"),
    ActionKind.RECOMPUTE: ("recompute", "thread_state_sleeping"),
    ActionKind.HEAD: ("head", "rail_animation"),
    ActionKind.SEND: ("send", "grey"),
    ActionKind.RECV: ("wait", "white"),
    ActionKind.GATHER: ("gather", "rail_response"),
    ActionKind.REDUCE: ("reduce", "thread_state_unknown"),
}
_PIDS = {"simulated": 1, "measured": 2, "simulated, over dp": 3}
_TIDS_PER_PROCESS = 1_000_000  # both tools take a thread whose tid is 0 or its pid for special
_TIDS_PER_ROW = 10_000
_ROWS = 90  # of a rank; what is in flight beyond so many is laid over the last one


def write_trace(
    events: Sequence[Event],
    path: str | Path,
    *,
    measured: Sequence[Event] = (),
    memory: Sequence[MemorySample] = (),
    collectives: Sequence[Event] = (),
    inside: Sequence[CollectiveEvent] = (),
    measured_inside: Sequence[CollectiveEvent] = (),
) -> None:
    """Writes the simulated events, and beside them the measured ones if there are any.

    Each timeline is a process and each rank a thread of it; the simulated `collectives` over dp,
    which run beside the events, are one of their own. Collectives over tp, `inside` the simulated
    computes and `measured_inside` the measured ones, have threads below their rank's, one more for
    each that is in flight at once; where the rank stands still for one, its compute has a slice
    that says so. An arrow leads from a send to the
    receive of its message where both are there. `memory` of the simulation becomes a track of live
    bytes for each rank. Times are microseconds.
    """
    flow_ids = count(1)
    body: list[_TraceEvent] = []
    timelines = (events, inside), (measured, measured_inside), (collectives, ())
    for (name, pid), (timeline, graphs) in zip(_PIDS.items(), timelines, strict=True):
        if timeline:
            body += _timeline(pid, name, timeline, graphs, flow_ids)
    body += [_counter(sample) for sample in memory]
    Path(path).write_text(json.dumps({"traceEvents": body, "displayTimeUnit": "ms"}) + "\n")


def _timeline(
    pid: int,
    name: str,
    events: Sequence[Event],
    inside: Sequence[CollectiveEvent],
    flow_ids: Iterator[int],
) -> list[_TraceEvent]:
    per_rank: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        per_rank[event.rank].append(event)
    found = [_metadata(pid, 0, "process_name", name=name)]
    found.append(_metadata(pid, 0, "process_sort_index", sort_index=pid))
    timed: list[_TraceEvent] = []
    flows = _match_messages(events, flow_ids)
    for rank, mine in sorted(per_rank.items()):
        tid = _tid(pid, rank)
        found.append(_metadata(pid, tid, "thread_name", name=_thread_name(rank, mine)))
        found.append(_metadata(pid, tid, "thread_sort_index", sort_index=rank * (_ROWS + 1)))
        for event in sorted(mine, key=lambda e: (e.start_s, e.end_s)):
            timed.append(_slice(pid, event))
            if id(event) in flows:
                timed.append(_flow(pid, event, flows[id(event)]))
        for row, some in enumerate(_rows([e for e in inside if e.rank == rank]), 1):
            tid = _tid(pid, rank, row)
            name = f"rank {rank}, {some[0].axis}" + (f" ({row})" if row > 1 else "")
            order = rank * (_ROWS + 1) + row
            found.append(_metadata(pid, tid, "thread_name", name=name))
            found.append(_metadata(pid, tid, "thread_sort_index", sort_index=order))
            for collective in some:
                timed += _collective(pid, row, collective)
    # Stable, so that an arrow's end stands behind its own slice and before the rank's next one:
    # the tools bind it to the slice that was opened last.
    return found + sorted(timed, key=lambda e: float(e["ts"]))


def _counter(sample: MemorySample) -> _TraceEvent:
    return {
        "ph": "C",
        "pid": 1,
        "name": f"live bytes of rank {sample.rank}",
        "ts": _nanoseconds(sample.time_s) / 1000,
        "args": {"bytes": sample.live_bytes},
    }


def _tid(pid: int, rank: int, row: int = 0) -> int:
    return pid * _TIDS_PER_PROCESS + row * _TIDS_PER_ROW + rank


def _rows(collectives: Sequence[CollectiveEvent]) -> list[list[CollectiveEvent]]:
    """A rank's collectives in rows, so that no two of a row are in flight at once."""
    rows: list[list[CollectiveEvent]] = []
    for one in sorted(collectives, key=lambda e: (e.start_s, e.end_s)):
        free = [row for row in rows if row[-1].end_s <= one.start_s]
        if free or len(rows) == _ROWS:
            (free or rows[-1:])[0].append(one)
        else:
            rows.append([one])
    return rows


def _collective(pid: int, row: int, event: CollectiveEvent) -> Iterator[_TraceEvent]:
    """A collective in its row and, where the rank stands still for it, in its compute."""
    args = {
        "rank": event.rank, "axis": event.axis, "bytes": event.size_bytes,
        "hidden_us": _nanoseconds(event.hidden_s) / 1000,
    }  # fmt: skip
    tid, span_s = _tid(pid, event.rank, row), (event.start_s, event.end_s)
    yield _span(pid, tid, event.op, ("collective", "rail_load"), span_s, args)
    if event.wait_end_s > event.wait_start_s:
        tid, span_s = _tid(pid, event.rank), (event.wait_start_s, event.wait_end_s)
        yield _span(pid, tid, f"wait for {event.op}", ("wait", "white"), span_s, args)


def _span(
    pid: int, tid: int, name: str, kind: tuple[str, str], span_s: tuple[float, float],
    args: dict[str, Any],
) -> _TraceEvent:  # fmt: skip
    """A slice of a category and colour."""
    # Whole nanoseconds, so that a slice never reaches into the next one by a rounding error.
    start_ns, end_ns = map(_nanoseconds, span_s)
    return {
        "ph": "X", "pid": pid, "tid": tid, "name": name, "cat": kind[0], "cname": kind[1],
        "ts": start_ns / 1000, "dur": (end_ns - start_ns) / 1000, "args": args,
    }  # fmt: skip


def _metadata(pid: int, tid: int, kind: str, **args: str | int) -> _TraceEvent:
    return {"ph": "M", "pid": pid, "tid": tid, "name": kind, "args": args}


def _thread_name(rank: int, events: Sequence[Event]) -> str:
    labels = (parse_label(e.label) for e in events)
    stages = sorted({found.stage for found in labels if isinstance(found, ComputeLabel)})
    if not stages:
        return f"rank {rank}"
    noun = "stage" if len(stages) == 1 else "stages"
    return f"rank {rank}, {noun} {', '.join(map(str, stages))}"


def _nanoseconds(time_s: float) -> int:
    return round(time_s * 1e9)


def _slice(pid: int, event: Event) -> _TraceEvent:
    label = parse_label(event.label)
    args: dict[str, int] = {"rank": event.rank}
    if isinstance(label, ComputeLabel):
        args |= {"stage": label.stage, "micro_batch": label.micro_batch}
    elif isinstance(label, MessageLabel):
        args |= {"peer": label.peer}
    tid, span_s = _tid(pid, event.rank), (event.start_s, event.end_s)
    return _span(pid, tid, event.label, _KINDS[event.kind], span_s, args)


def _flow(pid: int, event: Event, flow_id: int) -> _TraceEvent:
    is_send = event.kind is ActionKind.SEND
    found: _TraceEvent = {
        "ph": "s" if is_send else "f",
        "pid": pid,
        "tid": _tid(pid, event.rank),
        "id": flow_id,
        "name": "message",
        "cat": "message",
        "ts": _nanoseconds(event.start_s if is_send else event.end_s) / 1000,
    }
    return found if is_send else {**found, "bp": "e"}


def _match_messages(events: Sequence[Event], flow_ids: Iterator[int]) -> dict[int, int]:
    """A flow's number for each send and receive, by the event's `id`, that belong together."""
    sends: dict[tuple[int, int, str], deque[Event]] = defaultdict(deque)
    receives: list[tuple[tuple[int, int, str], Event]] = []
    for event in sorted(events, key=lambda e: e.start_s):
        label = parse_label(event.label)
        if not isinstance(label, MessageLabel):
            continue
        if label.is_send:
            sends[event.rank, label.peer, label.content].append(event)
        else:
            receives.append(((label.peer, event.rank, label.content), event))
    flows: dict[int, int] = {}
    for key, receive in receives:
        if sends[key]:
            flows[id(sends[key].popleft())] = flows[id(receive)] = next(flow_ids)
    return flows
