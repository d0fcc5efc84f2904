"""The fastest choice of what blocks keep that fits a budget: exact for a chain of blocks.

A dynamic program over the blocks in their order, as for chains in Beaumont et al., "Optimal
Checkpointing for Heterogeneous Chains" (arXiv 1911.13214), with segments in place of a recursion:
after each block, the choices of which none has both fewer bytes and fewer seconds than another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from merakc.ir.recompute import Keep, Run
from merakc.passes.recompute.costs import BlockCost

# The most blocks that are made again together, and the most choices that are kept in mind behind a
# block: of more, one for each of so many equal parts of the budget.
LONGEST = 64
CHOICES = 2048

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Choice:
    """What blocks keep: the bytes that stay from forward to backward, the highest point of one
    micro-batch, and the seconds that the backward takes more.
    """

    runs: tuple[Run, ...]
    stored_bytes: int
    peak_bytes: int
    again_s: float


@dataclass(frozen=True, slots=True)
class Step:
    """A run of blocks: what it stores, the most that is alive beside what runs before it store, and
    the seconds that making it again takes.
    """

    run: Run
    stored_bytes: int
    peak_bytes: int
    again_s: float


def steps_from(costs: Sequence[BlockCost], first: int, longest: int = LONGEST) -> Iterator[Step]:
    """The runs that may begin with a block."""
    c = costs[first]
    whole = c.read_bytes + c.saved_bytes
    peak = max(whole + c.backward_bytes, c.entering_bytes + c.forward_bytes)
    yield Step(Run(Keep.KEPT, 1), whole, peak, 0.0)
    if c.product_s < c.tail_s:
        left = c.saved_bytes + max(c.backward_bytes, c.begin_bytes)
        peak = c.entering_bytes + max(c.product_bytes + c.begin_bytes, left, c.forward_bytes)
        yield Step(Run(Keep.PRODUCTS, 1), c.entering_bytes + c.product_bytes, peak, c.product_s)
    remade = making = using = 0
    seconds = 0.0
    for k in range(first, min(len(costs), first + longest)):
        own = costs[k]
        before = remade + (own.entering_bytes if k > first else 0)
        making = max(making, before + own.forward_bytes)
        remade += own.saved_bytes + (own.read_bytes if k > first else 0)
        using = max(using, remade + own.backward_bytes)
        beside = max(using, own.begin_bytes + max(remade, making))
        run = Run(Keep.AGAIN, k + 1 - first)
        yield Step(run, c.entering_bytes, c.entering_bytes + beside, seconds + own.tail_s)
        seconds += own.again_s


def solve(
    costs: Sequence[BlockCost], budget_bytes: int, in_flight: int = 1, longest: int = LONGEST
) -> Choice | None:
    """The choice that takes least time in a budget for the micro-batches in flight, of which each
    stores as much; None where even the least does not fit.
    """
    if in_flight == 1:
        return _solve(costs, budget_bytes, budget_bytes, longest)
    found: list[Choice] = []
    for part in range(1, LEVELS + 1):
        stored = budget_bytes * part // (LEVELS * in_flight)
        own = _solve(costs, budget_bytes - (in_flight - 1) * stored, stored, longest)
        found += [own] if own is not None else []
    return min(found, key=lambda one: (one.again_s, one.stored_bytes), default=None)


# What a micro-batch may store is tried in so many steps, where several are in flight.
LEVELS = 16


def _solve(
    costs: Sequence[BlockCost], budget_bytes: int, most_stored: int, longest: int
) -> Choice | None:
    blocks = len(costs)
    layers = [_Layer() for _ in range(blocks + 1)]
    layers[0].add(np.zeros(1), np.zeros(1), np.zeros(1), -1, np.zeros(1, int), None)
    for k in range(blocks):
        layers[k].prune(most_stored)
        here = layers[k]
        for step in steps_from(costs, k, longest):
            fits = here.stored + step.peak_bytes <= budget_bytes
            fits &= here.stored + step.stored_bytes <= most_stored
            at = np.nonzero(fits)[0]
            if len(at):
                layers[k + step.run.blocks].add(
                    here.stored[at] + step.stored_bytes,
                    here.seconds[at] + step.again_s,
                    np.maximum(here.peak[at], here.stored[at] + step.peak_bytes),
                    k, at, step,
                )  # fmt: skip
    layers[blocks].prune(most_stored)
    end = layers[blocks]
    if not len(end.stored):
        return None
    best = int(np.lexsort((end.stored, end.seconds))[0])
    stored, peak, again_s = int(end.stored[best]), int(end.peak[best]), float(end.seconds[best])
    runs: list[Run] = []
    k = blocks
    while k:
        k, best, step = layers[k].came[best]
        runs.append(step.run)
    return Choice(tuple(reversed(runs)), stored, peak, again_s)


class _Layer:
    """The choices for the first blocks, and from which choice for fewer each came, by which run."""

    def __init__(self) -> None:
        self.parts: list[tuple[Floats, Floats, Floats, int, npt.NDArray[np.int64], Step | None]] = []
        self.stored = self.seconds = self.peak = np.zeros(0)
        self.came: list[tuple[int, int, Step]] = []

    def add(
        self, stored: Floats, seconds: Floats, peak: Floats, block: int,
        at: npt.NDArray[np.int64], step: Step | None,
    ) -> None:  # fmt: skip
        self.parts.append((stored, seconds, peak, block, at, step))

    def prune(self, most_stored: int) -> None:
        """Leaves those of which none has both less stored and fewer seconds than another."""
        if not self.parts:
            return
        stored, seconds, peak = (np.concatenate([p[k] for p in self.parts]) for k in range(3))
        whose = np.repeat(np.arange(len(self.parts)), [len(p[0]) for p in self.parts])
        place = np.concatenate([p[4] for p in self.parts])
        order = np.lexsort((seconds, stored))
        least = np.minimum.accumulate(seconds[order])
        better = np.r_[True, least[1:] < least[:-1]]
        order = order[better]
        if len(order) > CHOICES:  # the fastest of each part of the bytes: the last of it
            level = (stored[order] * (CHOICES / max(most_stored, 1))).astype(int)
            order = order[np.r_[level[1:] != level[:-1], True]]
        self.stored, self.seconds, self.peak = stored[order], seconds[order], peak[order]
        self.came = [
            (self.parts[w][3], int(p), s)
            for w, p in zip(whose[order], place[order], strict=True)
            if (s := self.parts[w][5]) is not None or self.parts[w][3] < 0
        ]  # type: ignore[misc]
