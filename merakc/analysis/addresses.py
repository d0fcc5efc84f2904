"""A place in one arena for every piece of memory of a step, found before it runs.

Finding the smallest arena is dynamic storage allocation, which is NP-hard. Greedy by size with the
best fit (Pisarchyk and Lee, arXiv 2001.03288, algorithm 3) places the largest first, each in the
smallest gap between those that are alive with it. Where that stays above the bound, what stuck out
is placed earlier in the next round (squeaky wheel optimization, Joslin and Clements, arXiv
1105.5454).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from merakc.analysis.lives import Life, most_alive

ALIGNMENT_BYTES: Final = 64  # of torch's memory on a CPU: a line of its cache, and of AVX-512
# By which lives are sorted first; ties go by when they begin.
ORDERS: Final[Sequence[Callable[[Life], tuple[int, ...]]]] = (
    lambda life: (-life.size_bytes, life.start - life.stop),
    lambda life: (-life.size_bytes * (1 + life.stop - life.start),),
    lambda life: (life.start - life.stop, -life.size_bytes),
)
# Of each order; and no more once so many lives have been placed, which takes two seconds.
ROUNDS, MOST_PLACED = 30, 20_000
GOOD: Final = 1.005  # over the bound; a better one is not looked for
Vector = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class Arena:
    """Where each life begins, in bytes; the arena's bytes, and the most that are needed at one
    moment, below which none can be.
    """

    offsets: tuple[int, ...]
    size_bytes: int
    bound_bytes: int

    @property
    def share(self) -> float:
        """Its bytes over the bound."""
        return self.size_bytes / self.bound_bytes if self.bound_bytes else 1.0


def place(lives: Sequence[Life], alignment_bytes: int = ALIGNMENT_BYTES) -> Arena:
    """An arena in which lives that meet at a moment have no byte in common.

    Each begins at a multiple of the alignment, to which sizes are rounded up.
    """
    sizes = [-(-own.size_bytes // alignment_bytes) * alignment_bytes for own in lives]
    whole = [
        Life(own.name, size, own.start, own.stop) for own, size in zip(lives, sizes, strict=True)
    ]
    bound_bytes = most_alive(whole)
    rounds = min(ROUNDS, MOST_PLACED // (len(ORDERS) * max(len(lives), 1)))
    found: list[Arena] = []
    for order in ORDERS if rounds else ORDERS[:1]:
        turns = sorted(range(len(whole)), key=lambda k: (*order(whole[k]), whole[k].start))
        for _ in range(max(rounds, 1)):
            offsets = _greedy(whole, turns)
            tops = [begin + size for begin, size in zip(offsets, sizes, strict=True)]
            found.append(Arena(tuple(offsets), max(tops, default=0), bound_bytes))
            if found[-1].size_bytes <= GOOD * bound_bytes:
                return found[-1]
            earlier = {
                k: (at - 1) / 2 if tops[k] > bound_bytes else at for at, k in enumerate(turns)
            }
            turns.sort(key=earlier.__getitem__)
    return min(found, key=lambda arena: arena.size_bytes)


def _greedy(lives: Sequence[Life], turns: Sequence[int]) -> list[int]:
    """The offset of each life, placed in these turns."""
    starts, stops, begins, ends = (np.zeros(len(lives), dtype=np.int64) for _ in range(4))
    for turn, k in enumerate(turns):
        own = lives[k]
        meets = np.flatnonzero((starts[:turn] <= own.stop) & (stops[:turn] >= own.start))
        begin = _best_fit(begins[meets], ends[meets], own.size_bytes)
        starts[turn], stops[turn] = own.start, own.stop
        begins[turn], ends[turn] = begin, begin + own.size_bytes
    offsets = np.empty(len(lives), dtype=np.int64)
    offsets[turns] = begins
    found: list[int] = offsets.tolist()
    return found


def _best_fit(begins: Vector, ends: Vector, size_bytes: int) -> int:
    """The begin of the smallest gap of at least so many bytes; behind all where there is none."""
    turns = np.argsort(begins, kind="stable")
    tops = np.maximum.accumulate(np.concatenate(([0], ends[turns])))
    gaps = begins[turns] - tops[:-1]
    fits = np.flatnonzero(gaps >= size_bytes)
    return int(tops[fits[np.argmin(gaps[fits])]] if len(fits) else tops[-1])
