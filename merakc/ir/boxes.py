"""Which boxes of a whole tensor a rank's part of it fills: what checkpoints write and read."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

from merakc.ir.layout import Layout

Dim = tuple[
    int, int, int
]  # a run of one dim's indices: start in the part, start in the whole, size


@dataclass(frozen=True, slots=True)
class Box:
    """A box of a whole tensor, and where it begins in the tp rank's part of that tensor."""

    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    local_starts: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        """The indices of the whole tensor that it covers."""
        return tuple(slice(a, a + n) for a, n in zip(self.starts, self.sizes, strict=True))


def part_boxes(layout: Layout, tp: int, rank: int, start: int, stop: int) -> tuple[Box, ...]:
    """The boxes of elements `start` to `stop` of tp rank `rank`'s part, in row-major order of it.

    Together they hold each of these elements once.
    """
    dims = [_runs(layout, k, tp, rank) for k in range(len(layout.dims))]
    found = []
    for starts, sizes in flat_boxes(layout.local_shape(tp, rank), start, stop):
        cut = [_within(runs, a, n) for runs, a, n in zip(dims, starts, sizes, strict=True)]
        for box in product(*cut):
            local, whole, size = zip(*box, strict=True) if box else ((), (), ())
            found.append(Box(tuple(whole), tuple(size), tuple(local)))
    return tuple(found)


def flat_boxes(
    shape: Sequence[int], start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The elements `start` to `stop` of a row-major array of that shape, as (starts, sizes)."""
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    inner = math.prod(shape[1:])
    rows, left = range(-(-start // inner), stop // inner), shape[1:]
    if start // inner == (stop - 1) // inner and stop - start < inner:  # within one row
        yield from _in_row(start // inner, left, start % inner, start % inner + stop - start)
        return
    if start % inner:
        yield from _in_row(start // inner, left, start % inner, inner)
    if rows:
        yield (rows.start, *(0 for _ in left)), (len(rows), *left)
    if stop % inner:
        yield from _in_row(stop // inner, left, 0, stop % inner)


def _in_row(
    row: int, shape: Sequence[int], start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    for starts, sizes in flat_boxes(shape, start, stop):
        yield (row, *starts), (1, *sizes)


def _runs(layout: Layout, dim: int, tp: int, rank: int) -> list[Dim]:
    """The neighbouring indices of a dim that a rank holds."""
    if not any(factor.split for factor in layout.dims[dim]):
        return [(0, 0, layout.shape[dim])]
    index = layout.index(dim, tp, rank)
    if not len(index):
        return []
    breaks = (index.diff() != 1).nonzero().reshape(-1).add(1).tolist()
    bounds = [0, *breaks, len(index)]
    return [(a, int(index[a]), b - a) for a, b in pairwise(bounds)]


def _within(runs: Sequence[Dim], start: int, size: int) -> list[Dim]:
    """What lies in `size` indices of the part from `start`; the local starts stay the part's."""
    found = []
    for local, whole, length in runs:
        first, last = max(local, start), min(local + length, start + size)
        if first < last:
            found.append((first, whole + first - local, last - first))
    return found
