"""Pipeline stages as intervals of a topological order: the exact dynamic programs.

The least largest load is the chains-on-chains problem (Pinar and Aykanat, "Fast optimal load
balancing algorithms for 1D partitioning", 2004), solved by bisection over exact integer loads.
The least bytes within a given load is a dynamic program over (stages so far, position). What a
stage [i, e) reads from before i depends on i and e alone, so the bytes are the true metric, each
value once per reading stage, and not merely what is alive at the boundaries.

Where stages are not equally fast, the load of one is its weight over its speed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt

_UNREACHED = 1 << 62
"""Cost of what no cut can give; two costs still add up within 64 bits."""
SPEED_UNIT = 1 << 20
"""The speed of the slowest stage. Speeds are integers, as weights are, so that loads stay exact."""


@dataclass(frozen=True, slots=True)
class Value:
    """What `producer` sends to `readers` (ascending)."""

    producer: int
    readers: tuple[int, ...]
    size_bytes: int


@dataclass(frozen=True, slots=True)
class WeightedDag:
    """Nodes numbered in a topological order, with the values that pass between them.

    `weights` are integers: sums of loads are exact and equal cuts tie on every machine.
    """

    weights: tuple[int, ...]
    values: tuple[Value, ...]

    def reordered(self, order: Sequence[int]) -> WeightedDag:
        """The same graph with node `order[i]` numbered i; `order` must be topological."""
        position = [0] * len(order)
        for place, node in enumerate(order):
            position[node] = place
        values = tuple(
            Value(position[v.producer], tuple(sorted(position[r] for r in v.readers)), v.size_bytes)
            for v in self.values
        )
        assert all(v.producer < v.readers[0] for v in values), "the order is not topological"
        return WeightedDag(tuple(self.weights[node] for node in order), values)

    def crossing_bytes(self) -> npt.NDArray[np.int64]:
        """The bytes produced before and read at or after each position, (nodes + 1,)."""
        change = np.zeros(len(self.weights) + 1, dtype=np.int64)
        for value in self.values:
            change[value.producer + 1] += value.size_bytes
            change[value.readers[-1] + 1] -= value.size_bytes
        return np.cumsum(change)


def cut_bytes(dag: WeightedDag, stage: Sequence[int]) -> int:
    """The bytes between stages: each value once per stage that reads it, its own left out."""
    return sum(
        value.size_bytes * len({stage[r] for r in value.readers} - {stage[value.producer]})
        for value in dag.values
    )


def rooms(stages: int, load: int, speeds: Sequence[int] | None) -> list[int]:
    """The most weight that each stage may have at a load; at no `speeds` all are equally fast."""
    return [load * speed // SPEED_UNIT for speed in speeds or (SPEED_UNIT,) * stages]


def largest_load(
    dag: WeightedDag, stage: Sequence[int], stages: int, speeds: Sequence[int] | None = None
) -> int:
    """The load of the heaviest stage: the least at which each has room for its weight."""
    loads = [0] * stages
    for weight, own in zip(dag.weights, stage, strict=True):
        loads[own] += weight
    if speeds:
        loads = [-(-load * SPEED_UNIT // speed) for load, speed in zip(loads, speeds, strict=True)]
    return max(loads)


def least_largest_load(
    weights: Sequence[int], stages: int, speeds: Sequence[int] | None = None
) -> int:
    """The exact least load of the heaviest of `stages` intervals of `weights`.

    Each has a positive weight, of which there must be as many as stages.
    """
    prefix = [0, *accumulate(weight for weight in weights if weight)]
    total, heaviest = prefix[-1], max(weights)

    def fits(load: int) -> bool:
        every = rooms(stages, load, speeds)
        if min(every) < heaviest:
            return _can_end(prefix, every)
        # Every stage takes what it can: where another is left without work, one with two weights
        # can be split instead.
        start = 0
        for room in every:
            start = bisect_right(prefix, prefix[start] + room) - 1
        return prefix[start] == total

    fastest, together = (max(speeds), sum(speeds)) if speeds else (SPEED_UNIT, stages * SPEED_UNIT)
    low = max(-(-heaviest * SPEED_UNIT // fastest), -(-total * SPEED_UNIT // together))
    high = total
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return low


def _can_end(prefix: Sequence[int], every: Sequence[int]) -> bool:
    """Whether intervals of at most these weights, none empty, end where the sums of positive
    weights end; what is too heavy for one stage may leave gaps between the places it can end at.
    """
    sums = np.array(prefix, dtype=np.int64)
    ends = np.zeros(len(sums), dtype=bool)
    ends[0] = True
    for room in every:
        first = np.searchsorted(sums, sums - min(room, prefix[-1]), side="left")
        before = np.concatenate(([0], np.cumsum(ends)[:-1]))
        ends = before > before[first]
    return bool(ends[-1])


def least_bytes(
    dag: WeightedDag, stages: int, load: int, speeds: Sequence[int] | None = None
) -> list[int]:
    """The stage of each node, in intervals of at most `load` that move the fewest bytes.

    Every stage holds a positive weight. Among cuts of equal bytes the one with the least sum of
    squared loads is taken, so that a heavy node that bounds the load leaves the others even.
    `load` must be at least `least_largest_load`, and as many weights positive as there are stages.
    O(nodes x window x stages in reach) time, where a window is the nodes that fit in one stage,
    and O(nodes x stages) memory.
    """
    count = len(dag.weights)
    if stages == 1:
        return [0] * count
    prefix = np.concatenate(([0], np.cumsum(np.array(dag.weights, dtype=np.int64))))
    room = [min(own, int(prefix[-1])) for own in rooms(stages, load, speeds)]
    firsts = {own: np.searchsorted(prefix, prefix - own, side="left") for own in set(room)}
    first = firsts[max(room)]
    last = np.searchsorted(prefix, prefix, side="left") - 1
    fewest, most = _reach(prefix, first, stages, max(room))
    bytes_unit, square_unit = _units(dag, stages, int(prefix[-1]))
    # Of stages that are not equally fast, what each may begin with, and what its weight counts.
    starts = np.stack([firsts[own] for own in room]) if speeds and len(set(speeds)) > 1 else None
    units = square_unit * SPEED_UNIT / np.array(speeds or (SPEED_UNIT,), dtype=float)[:, None]
    reads = _first_reads(dag)
    entering = np.zeros(count, dtype=np.int64)
    best = np.full((stages + 1, count + 1), _UNREACHED, dtype=np.int64)
    best[0, 0] = 0
    start_of = np.zeros((stages + 1, count + 1), dtype=np.int32)
    for end in range(1, count + 1):
        for after, size_bytes in reads[end - 1]:
            entering[after:end] += size_bytes * bytes_unit
        window = slice(int(first[end]), int(last[end]) + 1)
        rows = slice(max(fewest[end], 1), most[end] + 1)
        if window.start >= window.stop or rows.start >= rows.stop:
            continue
        own = slice(rows.start - 1, rows.stop - 1)  # the stages that may end here
        weights = prefix[end] - prefix[window]
        squares = (weights * (square_unit if starts is None else units[own])) ** 2
        total = best[own, window] + (entering[window] + squares.astype(np.int64))
        if starts is not None:
            total[np.arange(window.start, window.stop) < starts[own, end, None]] = _UNREACHED
        choice = total.argmin(axis=1)
        best[rows, end] = np.minimum(total[np.arange(len(choice)), choice], _UNREACHED)
        start_of[rows, end] = choice + window.start
    assert best[stages, count] < _UNREACHED, f"no cut into {stages} stages of load {load}"
    return _stages_of(start_of, stages, count)


def _stages_of(start_of: npt.NDArray[np.int32], stages: int, count: int) -> list[int]:
    stage = [0] * count
    end = count
    for index in range(stages, 0, -1):
        start = int(start_of[index, end])
        stage[start:end] = [index - 1] * (end - start)
        end = start
    return stage


def _reach(
    prefix: npt.NDArray[np.int64], first: npt.NDArray[np.intp], stages: int, load: int
) -> tuple[list[int], list[int]]:
    """The fewest and the most stages that may end at each position: few, where loads are tight."""
    count = len(prefix) - 1
    furthest = np.searchsorted(prefix, prefix + load, side="right") - 1
    fewest, most = [0] * (count + 1), [stages] * (count + 1)
    for end in range(1, count + 1):
        fewest[end] = fewest[int(first[end])] + 1
    for end in range(count - 1, -1, -1):
        most[end] = most[int(furthest[end])] - 1
    return fewest, most


def _units(dag: WeightedDag, stages: int, total: int) -> tuple[int, float]:
    """Factors that put bytes and squared loads in one integer: all squares make under one byte."""
    most_bytes = sum(v.size_bytes * min(len(v.readers), stages) for v in dag.values)
    bytes_unit = max(1, (_UNREACHED >> 1) // (most_bytes + 1))
    return bytes_unit, float(np.sqrt(bytes_unit / 2) / max(total, 1))


def _first_reads(dag: WeightedDag) -> list[list[tuple[int, int]]]:
    """For each node, (after, bytes): stages that begin in [after, node] first read that there."""
    reads: list[dict[int, int]] = [{} for _ in dag.weights]
    for value in dag.values:
        before = value.producer
        for reader in value.readers:
            here = reads[reader]
            here[before + 1] = here.get(before + 1, 0) + value.size_bytes
            before = reader
    return [list(here.items()) for here in reads]
