"""The orders of the known schedules as arrays, each made once: many candidates are timed by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from merakc.ir.costs import StageCost
from merakc.ir.program import COMPUTES
from merakc.ir.strategy import Strategy
from merakc.schedules.registry import make_orders, stage_ranks
from merakc.schedules.timing import effects_of
from merakc.schedules.work import BACKWARD, FORWARD, INPUT_GRAD, RECOMPUTE, Work

Integers = npt.NDArray[np.int64]
CHECKPOINT = len(COMPUTES)  # of `StageCost.effects`, a forward that keeps a checkpoint alone
# More than any machine has: of a value that is larger no more is known, and sums stay numbers.
MOST_BYTES = 1 << 50


# Compared as what it is: arrays are not equal or unequal.
@dataclass(frozen=True, eq=False)
class KnownOrders:
    """The works of each pipeline rank: their kinds and units, `[works]` each.

    `rank_of` are the ranks of the stages, of which all micro-batches of `again` are recomputed.
    """

    rank_of: tuple[int, ...]
    micro_batches: int
    kinds: tuple[Integers, ...]
    units: tuple[Integers, ...]
    again: tuple[int, ...] = ()

    @cached_property
    def works(self) -> list[list[Work]]:
        """The same in the form that is run."""
        each = zip(self.kinds, self.units, strict=True)
        return [list(zip(k.tolist(), u.tolist(), strict=True)) for k, u in each]

    @cached_property
    def in_flight(self) -> tuple[int, ...]:
        """The most micro-batches of each stage between their forward and their backward."""
        found = [0] * len(self.rank_of)
        for kinds, units in zip(self.kinds, self.units, strict=True):
            stages = units // self.micro_batches
            steps = (kinds == FORWARD).astype(np.int64)
            ends = (kinds == BACKWARD) | (kinds == INPUT_GRAD)
            for stage in np.unique(stages).tolist():
                own = stages == stage
                found[stage] = int(np.cumsum(steps[own] - ends[own]).max(initial=0))
        return tuple(found)

    @cached_property
    def _flat(self) -> tuple[Integers, Integers, Integers]:
        """The works of all ranks, one rank behind the other: their stages, and which of the effects
        of these they have; and how many each rank has.
        """
        kinds, units = np.concatenate(self.kinds), np.concatenate(self.units)
        stages = units // self.micro_batches
        is_short = (kinds == FORWARD) & self._among(self.again)[stages]
        counts = np.array([len(own) for own in self.kinds])
        return stages, np.where(is_short, CHECKPOINT, kinds), counts

    def peak_bytes(self, costs: Sequence[StageCost]) -> tuple[int, ...]:
        """The most bytes that each rank holds, as `merakc.schedules.timing.peak_bytes` has them."""
        sizes = [[[min(n, MOST_BYTES) for n in own[1:]] for own in e] for e in effects_of(costs)]
        stages, effects, counts = self._flat
        starts = np.cumsum(counts) - counts
        own, kept = np.array(sizes, dtype=np.int64)[stages, effects].T
        # Of all ranks together that may be beyond such numbers, which the difference is not.
        live = np.cumsum(kept)
        live -= np.repeat((live - kept)[starts], counts)
        highest = np.maximum.reduceat(np.maximum(live - kept + own, live), starts)
        static = [0] * len(self.kinds)
        for cost, rank in zip(costs, self.rank_of, strict=True):
            static[rank] += cost.static_bytes
        return tuple(held + max(int(n), 0) for held, n in zip(static, highest, strict=True))

    def recomputing(self, again: tuple[int, ...]) -> KnownOrders:
        """The orders with a recomputation of these stages in front of their backwards."""
        if not again:
            return self
        recomputed = self._among(again)
        kinds, units = [], []
        for own, own_units in zip(self.kinds, self.units, strict=True):
            is_back = (own == BACKWARD) | (own == INPUT_GRAD)
            counts = 1 + (is_back & recomputed[own_units // self.micro_batches])
            made = np.repeat(own, counts)
            made[(np.cumsum(counts) - counts)[counts > 1]] = RECOMPUTE
            kinds.append(made)
            units.append(np.repeat(own_units, counts))
        return KnownOrders(self.rank_of, self.micro_batches, tuple(kinds), tuple(units), again)

    def forwards_first(self) -> KnownOrders:
        """The orders with each rank's forwards before all else."""
        places = [np.argsort(own != FORWARD, kind="stable") for own in self.kinds]
        kinds = tuple(own[at] for own, at in zip(self.kinds, places, strict=True))
        units = tuple(own[at] for own, at in zip(self.units, places, strict=True))
        return KnownOrders(self.rank_of, self.micro_batches, kinds, units, self.again)

    def _among(self, stages: Sequence[int]) -> npt.NDArray[np.bool_]:
        """Whether each stage is one of these."""
        found = np.zeros(len(self.rank_of), dtype=np.bool_)
        found[list(stages)] = True
        return found


@lru_cache(maxsize=256)
def known_orders(
    name: str,
    ranks: int,
    micro_batches: int,
    virtual_stages: int,
    again: tuple[int, ...] = (),
    *,
    whole_batch: bool = False,
) -> KnownOrders:
    """The orders of a known schedule with so many stages a rank, where these stages recompute; of a
    loss that waits for the `whole_batch`, with all forwards first.

    Raises `ConfigError` as `make_schedule` does.
    """
    if whole_batch:
        return known_orders(name, ranks, micro_batches, virtual_stages, again).forwards_first()
    if again:
        return known_orders(name, ranks, micro_batches, virtual_stages).recomputing(again)
    rank_of, orders = make_orders(
        name,
        ranks,
        micro_batches,
        recompute="none",
        virtual_stages=virtual_stages if virtual_stages > 1 else None,
    )
    works = [np.array(order, dtype=np.int64).reshape(-1, 2).T for order in orders]
    kinds, units = ([np.ascontiguousarray(own[k]) for own in works] for k in (0, 1))
    return KnownOrders(rank_of, micro_batches, tuple(kinds), tuple(units))


def name_of(strategy: Strategy) -> str:
    """The schedule of a strategy; 1F1B of several stages a rank is interleaved."""
    is_plain = strategy.schedule == "1f1b" and strategy.chunks > 1
    return "interleaved-1f1b" if is_plain else strategy.schedule


def rank_of(strategy: Strategy) -> tuple[int, ...]:
    """The pipeline rank of each stage."""
    chunks = strategy.chunks if strategy.chunks > 1 else None
    return stage_ranks(name_of(strategy), strategy.pp, chunks)
