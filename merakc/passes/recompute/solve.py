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
# What a micro-batch may store is tried in so many steps, where several are in flight.
LEVELS = 16
HALVINGS = 12

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


def steps_from(costs: Sequence[BlockCost], first: int) -> Iterator[Step]:
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
    for k in range(first, min(len(costs), first + LONGEST)):
        own = costs[k]
        before = remade + (own.entering_bytes if k > first else 0)
        making = max(making, before + own.forward_bytes)
        remade += own.saved_bytes + (own.read_bytes if k > first else 0)
        using = max(using, remade + own.backward_bytes)
        beside = max(using, own.begin_bytes + max(remade, making))
        run = Run(Keep.AGAIN, k + 1 - first)
        yield Step(run, c.entering_bytes, c.entering_bytes + beside, seconds + own.tail_s)
        seconds += own.again_s


def solve(costs: Sequence[BlockCost], budget_bytes: int, in_flight: int = 1) -> Choice | None:
    """The choice that takes least time in a budget for the micro-batches in flight, of which each
    stores as much; None where even the least does not fit.
    """
    best: Choice | None = None
    waiting = [list(_shares(budget_bytes, in_flight))]
    while waiting:
        shares = waiting.pop()
        # No share of these gives more than the first has at its highest and the last stores.
        peak, stored = shares[0][0], shares[-1][1]
        found = _solve(costs, peak, stored)
        if found is None or (best is not None and _order(found) >= _order(best)):
            continue
        if any(found.peak_bytes <= p and found.stored_bytes <= s for p, s in shares):
            best = found
        elif len(shares) > 1:
            middle = len(shares) // 2
            waiting += [shares[:middle], shares[middle:]]
    return best


def _order(choice: Choice) -> tuple[float, int]:
    return choice.again_s, choice.stored_bytes


def _shares(budget_bytes: int, in_flight: int) -> Iterator[tuple[int, int]]:
    """What a micro-batch may have at its highest, and may store, so that all are in the budget."""
    if in_flight == 1:
        yield budget_bytes, budget_bytes
        return
    for part in range(1, LEVELS + 1):
        stored = budget_bytes * part // (LEVELS * in_flight)
        yield budget_bytes - (in_flight - 1) * stored, stored


def least_bytes(costs: Sequence[BlockCost], in_flight: int = 1) -> int:
    """About the least budget with a choice."""
    whole = sum(c.read_bytes + c.saved_bytes + c.entering_bytes for c in costs)
    end = _layers(costs, None, whole)

    def is_enough(budget_bytes: int) -> bool:
        return any(
            bool(((end.stored <= stored) & (end.peak <= peak)).any())
            for peak, stored in _shares(budget_bytes, in_flight)
        )

    low, high = 0, in_flight * whole
    high += max((c.forward_bytes + c.backward_bytes for c in costs), default=0)
    for _ in range(HALVINGS):
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


def _solve(costs: Sequence[BlockCost], budget_bytes: int, most_stored: int) -> Choice | None:
    end = _layers(costs, budget_bytes, most_stored)
    if not len(end.stored):
        return None
    best = int(np.lexsort((end.stored, end.seconds))[0])
    figures = int(end.stored[best]), int(end.peak[best]), float(end.seconds[best])
    return Choice(_joined(end.runs(best)), *figures)


def _layers(costs: Sequence[BlockCost], budget_bytes: int | None, most_stored: int) -> _Layer:
    """The choices for all blocks: the fastest in a budget, or without one those of low peaks."""
    layers = [_Layer() for _ in range(len(costs) + 1)]
    layers[0].add(_Part(np.zeros(1), np.zeros(1), np.zeros(1), np.zeros(1, int)))
    for k, layer in enumerate(layers):
        layer.prune(most_stored, by_peak=budget_bytes is None)
        if k == len(costs):
            break
        for step in steps_from(costs, k):
            fits = layer.stored + step.stored_bytes <= most_stored
            if budget_bytes is not None:
                fits &= layer.stored + step.peak_bytes <= budget_bytes
            at = np.nonzero(fits)[0]
            if len(at):
                before = layer.stored[at]
                peak = np.maximum(layer.peak[at], before + step.peak_bytes)
                seconds = layer.seconds[at] + step.again_s
                part = _Part(before + step.stored_bytes, seconds, peak, at, layer, step)
                layers[k + step.run.blocks].add(part)
    return layers[-1]


def _joined(runs: Sequence[Run]) -> tuple[Run, ...]:
    """The runs, those that keep all in one with their neighbours."""
    found: list[Run] = []
    for run in runs:
        if found and found[-1].keep is run.keep is Keep.KEPT:
            found[-1] = Run(Keep.KEPT, found[-1].blocks + run.blocks)
        else:
            found.append(run)
    return tuple(found)


@dataclass(frozen=True, slots=True)
class _Part:
    """Choices that end with one step behind those of a layer, whose places there are `at`."""

    stored: Floats
    seconds: Floats
    peak: Floats
    at: npt.NDArray[np.int64]
    layer: _Layer | None = None
    step: Step | None = None


class _Layer:
    """The choices for the first blocks, and what each came from."""

    def __init__(self) -> None:
        self.parts: list[_Part] = []
        self.stored = self.seconds = self.peak = np.zeros(0)
        self.came = np.zeros((2, 0), int)  # the number of the part, and the place in it

    def add(self, part: _Part) -> None:
        self.parts.append(part)

    def runs(self, place: int) -> list[Run]:
        """The runs of a choice."""
        found: list[Run] = []
        layer = self
        while True:
            number, at = layer.came[:, place]
            part = layer.parts[number]
            if part.layer is None or part.step is None:
                return found[::-1]
            found.append(part.step.run)
            layer, place = part.layer, int(at)

    def prune(self, most_stored: int, *, by_peak: bool) -> None:
        """Leaves those of which none has both less stored and fewer seconds than another, or a
        lower peak.
        """
        if not self.parts:
            return
        stored = np.concatenate([part.stored for part in self.parts])
        seconds = np.concatenate([part.seconds for part in self.parts])
        peak = np.concatenate([part.peak for part in self.parts])
        less = peak if by_peak else seconds
        order = np.argsort(stored, kind="stable")  # the parts are in order: they are merged
        least = np.minimum.accumulate(less[order])
        order = order[np.r_[True, least[1:] < least[:-1]]]
        order = order[np.r_[stored[order[1:]] > stored[order[:-1]], True]]
        if len(order) > CHOICES:  # the fastest of each part of the bytes: the last of it
            level = (stored[order] * (CHOICES / max(most_stored, 1))).astype(int)
            order = order[np.r_[level[1:] != level[:-1], True]]
        self.stored, self.seconds, self.peak = stored[order], seconds[order], peak[order]
        numbers = np.repeat(np.arange(len(self.parts)), [len(part.at) for part in self.parts])
        self.came = np.stack([numbers, np.concatenate([part.at for part in self.parts])])[:, order]
