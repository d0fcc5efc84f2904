"""The events of a step in a few kilobytes of text, for a plan's file."""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import pydantic

from merakc.errors import PlanError
from merakc.files.reading import MOST_BYTES, decompressed, parse_json
from merakc.ir.program import ActionKind, Event
from merakc.ir.report import Timeline
from merakc.machines.figures import NotNegative
from merakc.simulation.simulate import MemorySample, Simulation

# Events that a file holds: of regular schedules each takes a few bytes.
MOST_EVENTS = 20_000
# Times are kept to this part of the step.
TICKS = 10_000_000
# Longer numbers in a label are of no stage, micro-batch or rank.
_LONG_NUMBER = re.compile(r"\d{10}")
_PEER = re.compile(r"((?:->|<-) )(\d+)$")


@dataclass(frozen=True, slots=True)
class Moments:
    """What happens in a step: computes and messages, collectives over dp, live bytes, and when
    ranks stand still for such collectives inside their computes.
    """

    step_s: float
    events: tuple[Event, ...]
    collectives: tuple[Event, ...] = ()
    memory: tuple[MemorySample, ...] = ()
    waits: tuple[Event, ...] = ()


def pack(simulation: Simulation, most: int = MOST_EVENTS) -> Timeline:
    """The simulated step; of more than `most` events those of the middle are left out."""
    found = Moments(
        simulation.step_s, simulation.events, simulation.collectives, simulation.memory,
        simulation.waits,
    )  # fmt: skip
    left_out_s = middle(found.events, most)
    if left_out_s is not None:
        found = without(found, left_out_s)
    tick_s = max(found.step_s, 1e-12) / TICKS
    body = {
        "step_s": found.step_s,
        "events": _columns(found.events, tick_s),
        "collectives": _columns(found.collectives, tick_s),
        "memory": _memory_columns(found.memory, tick_s),
        "waits": _columns(found.waits, tick_s),
    }
    text = json.dumps(body, separators=(",", ":"))
    if len(text) > MOST_BYTES and most > 1:  # it is not to be refused when it is read
        return pack(simulation, most // 2)
    packed = base64.b64encode(zlib.compress(text.encode(), 9)).decode()
    return Timeline(packed, left_out_s)


def placed(simulation: Simulation, places: Mapping[int, int]) -> Simulation:
    """The same with other numbers for ranks, those at the ends of messages included."""

    def renamed(events: Iterable[Event]) -> tuple[Event, ...]:
        return tuple(
            replace(
                e,
                rank=places[e.rank],
                label=_PEER.sub(lambda m: f"{m[1]}{places[int(m[2])]}", e.label),
            )
            for e in events
        )

    return replace(
        simulation,
        events=renamed(simulation.events),
        collectives=renamed(simulation.collectives),
        waits=renamed(simulation.waits),
        memory=tuple(replace(m, rank=places[m.rank]) for m in simulation.memory),
    )


def unpack(timeline: Timeline) -> Moments:
    """What was packed, times to a ten-millionth of the step.

    Raises `PlanError` where that is damaged, or is no step.
    """
    try:
        text = decompressed(base64.b64decode(timeline.packed, validate=True)).decode()
        body = _BODY.validate_python(parse_json(text))
        tick_s = max(body.step_s, 1e-12) / TICKS
        memory = tuple(
            MemorySample(rank, at * tick_s, size)
            for rank, times, sizes in body.memory
            for at, size in zip(_summed(times), _summed(sizes), strict=True)
        )
        events, collectives, waits = (
            tuple(_events(own, tick_s)) for own in (body.events, body.collectives, body.waits)
        )
        over_dp = (*collectives, *waits)
        if not all(e.kind in (ActionKind.GATHER, ActionKind.REDUCE) for e in over_dp):
            raise ValueError("something else stands among its collectives")
    except ValueError as error:
        first = str(error).splitlines()[0]
        raise PlanError(
            f"the plan's timeline cannot be read: {first}; make the plan again"
        ) from error
    return Moments(body.step_s, events, collectives, memory, waits)


def middle(events: Sequence[Event], most: int) -> tuple[float, float] | None:
    """The middle of a step without which `most` events are left; None where there are no more."""
    if len(events) <= most:
        return None
    ends, starts = sorted(e.end_s for e in events), sorted(e.start_s for e in events)
    first_s, last_s = ends[max(most // 2 - 1, 0)], starts[len(starts) - most // 2]
    return (first_s, last_s) if first_s < last_s else None


def without(found: Moments, left_out_s: tuple[float, float]) -> Moments:
    """What ends before the middle that is left out, or begins after it."""
    first_s, last_s = left_out_s
    memory = tuple(m for m in found.memory if not first_s < m.time_s < last_s)
    events, collectives, waits = (
        outside(own, left_out_s) for own in (found.events, found.collectives, found.waits)
    )
    return Moments(found.step_s, events, collectives, memory, waits)


def outside(events: Iterable[Event], left_out_s: tuple[float, float] | None) -> tuple[Event, ...]:
    """The events that end before a middle, or begin after it; all where none is left out."""
    first_s, last_s = left_out_s or (float("inf"), 0.0)
    return tuple(e for e in events if e.end_s <= first_s or e.start_s >= last_s)


def _columns(events: Sequence[Event], tick_s: float) -> list[Any]:
    """Rank by rank: labels, kinds, and times as differences, which repeat."""
    ranks = list(dict.fromkeys(e.rank for e in events))
    found: list[Any] = []
    for rank in ranks:
        own = [e for e in events if e.rank == rank]
        starts = [round(e.start_s / tick_s) for e in own]
        lengths = [round(e.end_s / tick_s) - start for e, start in zip(own, starts, strict=True)]
        labels, kinds = [e.label for e in own], [str(e.kind) for e in own]
        found.append([rank, labels, kinds, _differences(starts), lengths])
    return found


def _events(columns: Iterable[_Columns], tick_s: float) -> Iterable[Event]:
    for rank, labels, kinds, starts, lengths in columns:
        rows = zip(labels, kinds, _summed(starts), lengths, strict=True)
        for label, kind, start, length in rows:
            if start < 0 or not re.search(r"\d", label) or _LONG_NUMBER.search(label):
                raise ValueError(f"{label[:40]!r} at {start} is no event of a step")
            yield Event(rank, label, kind, start * tick_s, (start + length) * tick_s)


_Length = Annotated[int, pydantic.Field(ge=0)]
# A rank's labels, kinds, times of beginning as differences, and lengths, in ticks.
_Columns = tuple[int, list[str], list[ActionKind], list[int], list[_Length]]


@pydantic.dataclasses.dataclass(frozen=True)
class _Body:
    """What stands in a packed timeline; `memory` holds a rank's times and bytes, as differences."""

    step_s: NotNegative
    events: list[_Columns]
    collectives: list[_Columns]
    memory: list[tuple[int, list[int], list[int]]]
    waits: list[_Columns] = field(default_factory=list)  # of files from before, none


_BODY = pydantic.TypeAdapter(_Body)


def _memory_columns(memory: Sequence[MemorySample], tick_s: float) -> list[Any]:
    found: list[Any] = []
    for rank in dict.fromkeys(m.rank for m in memory):
        own = [m for m in memory if m.rank == rank]
        times = _differences([round(m.time_s / tick_s) for m in own])
        found.append([rank, times, _differences([m.live_bytes for m in own])])
    return found


def _differences(numbers: Sequence[int]) -> list[int]:
    return [now - before for before, now in zip([0, *numbers], numbers, strict=False)]


def _summed(differences: Iterable[int]) -> list[int]:
    total, found = 0, []
    for step in differences:
        total += step
        found.append(total)
    return found
