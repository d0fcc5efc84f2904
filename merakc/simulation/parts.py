"""What an action that is no message does: it computes, and meets collectives over dp on the way."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator
from dataclasses import dataclass

from merakc.costs.streams import Streams
from merakc.ir.costs import CostTable
from merakc.ir.program import Action, ActionKind, CollectiveKind

GATHERING = (CollectiveKind.REFRESH, CollectiveKind.GATHER)


@dataclass(slots=True)
class Compute:
    """A rank works so many seconds off, of a device that is alone."""

    left_s: float


@dataclass(slots=True)
class Wait:
    """A rank stands still for its collectives over dp."""

    left_s: float


def parts_of(
    action: Action, seconds: float, costs: CostTable, clock: Streams
) -> Iterator[Compute | Wait]:
    """One thing after the other, of an action that computes so long.

    Who goes on to the next has let the `clock` pass what a `Compute` takes, and may have let it
    pass a `Wait`; what is left of that is waited for here.
    """
    done = 0.0
    for collective in action.collectives:
        yield Compute(seconds * (collective.share - done))
        done = collective.share
        if collective.kind is CollectiveKind.WAIT:
            yield from _wait(clock, [(collective.bucket, kind) for kind in GATHERING])
        else:
            key = collective.bucket, collective.kind
            clock.post(key, costs.collective_s[key], 1.0 if key in costs.copied else None)
    if action.kind is ActionKind.REDUCE:
        yield from _wait(clock)
    yield Compute(seconds * (1.0 - done))


def _wait(clock: Streams, keys: Collection[Hashable] | None = None) -> Iterator[Wait]:
    left_s = clock.left_s(keys)
    if left_s > 0:
        yield Wait(left_s)
        clock.wait(keys)
