"""Pipeline stages as intervals of a topological order: the exact dynamic programs.

The least largest load is the chains-on-chains problem (Pinar and Aykanat, "Fast optimal load
balancing algorithms for 1D partitioning", 2004), solved by bisection over exact integer loads.
The least bytes within a given load is a dynamic program over (stages so far, position). What a
stage [i, e) reads from before i depends on i and e alone, so the bytes are the true metric, each
value once per reading stage, and not merely what is alive at the boundaries.
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

    def live_bytes(self) -> npt.NDArray[np.int64]:
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


def largest_load(dag: WeightedDag, stage: Sequence[int], stages: int) -> int:
    """The weight of the heaviest stage."""
    loads = [0] * stages
    for weight, own in zip(dag.weights, stage, strict=True):
        loads[own] += weight
    return max(loads)


def least_largest_load(weights: Sequence[int], stages: int) -> int:
    """The exact least weight of the heaviest of `stages` intervals of `weights`.

    Intervals of no weight change nothing: while there are as many positive weights as stages, one
    with two of them can be split instead.
    """
    prefix = [0, *accumulate(weights)]
    total = prefix[-1]

    def fits(load: int) -> bool:
        start = 0
        for _ in range(stages):
            start = bisect_right(prefix, prefix[start] + load) - 1
        return prefix[start] == total

    low, high = max(*weights, -(-total // stages)), total
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return low


def least_bytes(dag: WeightedDag, stages: int, load: int) -> list[int]:
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
    first = np.searchsorted(prefix, prefix - load, side="left")
    last = np.searchsorted(prefix, prefix, side="left") - 1
    fewest, most = _reach(prefix, first, stages, load)
    bytes_unit, square_unit = _units(dag, stages, int(prefix[-1]))
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
        squares = ((prefix[end] - prefix[window]) * square_unit) ** 2
        cost = entering[window] + squares.astype(np.int64)
        total = best[rows.start - 1 : rows.stop - 1, window] + cost
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
