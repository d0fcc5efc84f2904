"""What the actions of a step take, added up by stage and kind: of simulated or measured events."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from merakc.ir.ledger import Spent
from merakc.ir.program import ActionKind, CollectiveEvent, Event

_NONE_INSIDE: tuple[CollectiveEvent, ...] = ()


@dataclass(frozen=True, slots=True)
class Total:
    """The actions of one stage and kind on one rank: how many, their seconds, those of waiting."""

    count: int = 0
    seconds: float = 0.0
    waited_s: float = 0.0


Totals = Mapping[tuple[int, str], Total]


def rank_totals(
    events: Sequence[Event], inside: Iterable[CollectiveEvent] = _NONE_INSIDE
) -> dict[tuple[int, str], Total]:
    """The totals of one rank's step, by stage and kind; `inside` are its graphs' collectives.

    All of a receive is waiting. Sends take no time, and are left out.
    """
    found: dict[tuple[int, str], Total] = {}
    spans = sorted((e.start_s, e.end_s, *_key(e)) for e in events if e.kind.is_compute)
    for event in events:
        if event.kind is not ActionKind.SEND:
            seconds = event.end_s - event.start_s
            waited_s = seconds if event.kind is ActionKind.RECV else 0.0
            _add(found, _key(event), Total(1, seconds, waited_s))
    starts = [start_s for start_s, *_ in spans]
    for collective in inside:
        at = bisect_right(starts, collective.wait_start_s) - 1
        if at >= 0 and collective.wait_end_s <= spans[at][1]:
            waited_s = collective.wait_end_s - collective.wait_start_s
            _add(found, (spans[at][2], spans[at][3]), Total(0, 0.0, waited_s))
    return found


def by_rank(
    events: Iterable[Event], inside: Iterable[CollectiveEvent] = _NONE_INSIDE
) -> list[dict[tuple[int, str], Total]]:
    """The totals of each of several ranks."""
    own: dict[int, list[Event]] = {}
    collectives: dict[int, list[CollectiveEvent]] = {}
    for event in events:
        own.setdefault(event.rank, []).append(event)
    for collective in inside:
        collectives.setdefault(collective.rank, []).append(collective)
    return [rank_totals(of, collectives.get(rank, ())) for rank, of in sorted(own.items())]


def merged(ranks: Iterable[Totals]) -> tuple[Spent, ...]:
    """What ranks spend, by stage and kind: the mean over the ranks that hold it, and the most."""
    found: dict[tuple[int, str], list[Total]] = {}
    for totals in ranks:
        for key, total in totals.items():
            if total.count:
                found.setdefault(key, []).append(total)
    return tuple(
        Spent(
            *key,
            max(t.count for t in own),
            sum(t.seconds for t in own) / len(own),
            max(t.seconds for t in own),
            sum(t.waited_s for t in own) / len(own),
        )
        for key, own in sorted(found.items())
    )


def _key(event: Event) -> tuple[int, str]:
    return event.stage, str(event.kind)


def _add(found: dict[tuple[int, str], Total], key: tuple[int, str], more: Total) -> None:
    old = found.get(key, Total())
    found[key] = Total(
        old.count + more.count, old.seconds + more.seconds, old.waited_s + more.waited_s
    )
