"""The known schedules by name."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from merakc.errors import ConfigError
from merakc.ir.schedule import Schedule
from merakc.schedules.one_f_one_b import gpipe, interleaved, merak, one_f_one_b
from merakc.schedules.placement import Placement, place
from merakc.schedules.timing import with_recomputation
from merakc.schedules.v_shape import v_half, v_min, zb_v
from merakc.schedules.work import Work, decode
from merakc.schedules.zero_bubble import zb_h1, zb_h2

Recompute = Literal["none", "full"] | Collection[int]
Orders = list[list[Work]]


@dataclass(frozen=True, slots=True)
class Known:
    """A known schedule: where its stages are, and how its orders follow from the numbers of ranks,
    micro-batches and stages a rank.

    `virtual_stages` are the possible numbers of stages a rank, of which the first is the usual one.
    """

    placement: Placement
    make: Callable[[int, int, int], Orders]
    splits_backward: bool = False
    virtual_stages: range = range(1, 2)


def _fixed(make: Callable[[int, int], Orders]) -> Callable[[int, int, int], Orders]:
    return lambda ranks, micro_batches, virtual_stages: make(ranks, micro_batches)


_TWO = range(2, 3)
_MANY = range(2, 65)  # 64 a rank are more stages than models have layers
KNOWN: dict[str, Known] = {
    "gpipe": Known("plain", _fixed(gpipe)),
    "1f1b": Known("plain", _fixed(one_f_one_b)),
    "interleaved-1f1b": Known("interleaved", interleaved, virtual_stages=_MANY),
    "merak": Known("plain", _fixed(merak)),
    "zb-h1": Known("plain", _fixed(zb_h1), splits_backward=True),
    "zb-h2": Known("plain", _fixed(zb_h2), splits_backward=True),
    "zb-v": Known("v", _fixed(zb_v), splits_backward=True, virtual_stages=_TWO),
    "v-half": Known("v", _fixed(v_half), splits_backward=True, virtual_stages=_TWO),
    "v-min": Known("v", _fixed(v_min), splits_backward=True, virtual_stages=_TWO),
}
NAMES = tuple(KNOWN)


def find_schedule(name: str) -> Known:
    """The known schedule of this name. Raises `ConfigError` for any other name."""
    if name not in KNOWN:
        raise ConfigError(f"schedule {name!r} is not known; choose one of {', '.join(NAMES)}")
    return KNOWN[name]


def stage_ranks(name: str, ranks: int, virtual_stages: int | None = None) -> tuple[int, ...]:
    """The pipeline rank of each stage: a schedule's number of stages, before any is cut.

    `virtual_stages` are those of each rank; only `interleaved-1f1b` leaves a choice. Raises
    `ConfigError` for an unknown name, no ranks, or a number that the schedule does not have.
    """
    known = find_schedule(name)
    if ranks < 1:
        raise ConfigError(f"schedule {name}: {ranks} pipeline ranks; it needs at least 1")
    v = known.virtual_stages[0] if virtual_stages is None else virtual_stages
    if v not in known.virtual_stages:
        allowed = " to ".join(map(str, sorted({known.virtual_stages[0], known.virtual_stages[-1]})))
        raise ConfigError(f"schedule {name}: {v} virtual stages a rank; it takes {allowed}")
    return place(known.placement, ranks, v)


def make_schedule(
    name: str,
    ranks: int,
    micro_batches: int,
    *,
    recompute: Recompute | None = None,
    virtual_stages: int | None = None,
) -> Schedule:
    """The known schedule `name` for so many pipeline ranks and micro-batches.

    `recompute` names the stages whose micro-batches are all recomputed: "none", "full" for every
    stage (but the last under `merak`), or the stages' numbers. Unless it is given, `merak`
    recomputes and no other schedule does. Recomputations stand right before the backward, and so
    start before the gradient is there.

    Raises `ConfigError` for an unknown name and for values that are out of range.
    """
    if recompute is not None and not isinstance(recompute, str):
        recompute = tuple(recompute)
    return _decoded(name, ranks, micro_batches, recompute, virtual_stages)


@lru_cache(maxsize=32)
def _decoded(
    name: str, ranks: int, micro_batches: int, recompute: Recompute | None, stages: int | None
) -> Schedule:
    rank_of, orders = make_orders(
        name, ranks, micro_batches, recompute=recompute, virtual_stages=stages
    )
    return decode(name, rank_of, orders, micro_batches)


def make_orders(
    name: str,
    ranks: int,
    micro_batches: int,
    *,
    recompute: Recompute | None = None,
    virtual_stages: int | None = None,
) -> tuple[tuple[int, ...], Orders]:
    """The pipeline rank of each stage, and the works of each rank, of what `make_schedule` makes.

    Raises `ConfigError` as it does.
    """
    known = find_schedule(name)
    rank_of = stage_ranks(name, ranks, virtual_stages)
    m = micro_batches
    if m < 1:
        raise ConfigError(f"schedule {name}: micro_batches is {m}; a step needs at least 1")
    stages = _recomputed_stages(name, len(rank_of), recompute)
    orders = known.make(ranks, m, len(rank_of) // ranks)
    units = {s * m + j for s in stages for j in range(m)}
    return rank_of, with_recomputation(orders, units) if units else orders


def _recomputed_stages(name: str, stages: int, recompute: Recompute | None) -> Collection[int]:
    if recompute is None:
        recompute = "full" if name == "merak" else "none"
    if recompute == "full":
        return range(stages - 1 if name == "merak" else stages)
    if recompute == "none":
        if name == "merak":
            raise ConfigError(
                "schedule merak hides recomputation, and recompute is 'none'; choose "
                "recompute='stage', or schedule='1f1b', which takes the same time without any"
            )
        return ()
    if not all(isinstance(s, int) and 0 <= s < stages for s in recompute):
        raise ConfigError(
            f"schedule {name}: recompute is {recompute!r}; choose 'none', 'full' or the numbers "
            f"of stages, of which there are {stages}, from 0"
        )
    return recompute
