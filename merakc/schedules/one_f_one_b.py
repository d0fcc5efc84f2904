"""The schedules whose backward is whole: GPipe, 1F1B, interleaved 1F1B, and Merak's.

Micro-batches run in ascending order in every stage, forward and backward.
"""

from __future__ import annotations

from collections.abc import Sequence

from merakc.schedules.work import BACKWARD, FORWARD, Work


def gpipe(ranks: int, micro_batches: int) -> list[list[Work]]:
    """All forwards, then all backwards (Huang et al. 2019, section 2.2)."""
    m = micro_batches
    return [
        [(kind, s * m + j) for kind in (FORWARD, BACKWARD) for j in range(m)] for s in range(ranks)
    ]


def one_f_one_b(ranks: int, micro_batches: int) -> list[list[Work]]:
    """PipeDream-flush (Narayanan et al. 2021, section 2.2.1).

    Stage s of p opens with p - s - 1 forwards, so it holds at most p - s micro-batches.
    """
    m = micro_batches
    return [_alternate(_units(s, m), _units(s, m), ranks - s - 1) for s in range(ranks)]


def merak(ranks: int, micro_batches: int) -> list[list[Work]]:
    """1F1B whose critical path is shifted from the last stage to the one before it.

    The last stage recomputes nothing, so it is the shorter by one recomputation per micro-batch,
    and the stage before it is the one that must never wait. That one opens with one forward more,
    three in all, and runs forward again only after its second backward: so it recomputes
    micro-batches 0 and 1 while their gradients are on the way (Lai et al. 2023, section 5.2).
    """
    m = micro_batches
    orders = one_f_one_b(ranks, m)
    if ranks > 1:
        units = _units(ranks - 2, m)
        rest = _alternate(units[3:], units[2:], 0)
        opening = [(FORWARD, u) for u in units[:3]] + [(BACKWARD, u) for u in units[:1]]
        orders[-2] = [*opening, *((BACKWARD, u) for u in units[1:2]), *rest]
    return orders


def interleaved(ranks: int, micro_batches: int, virtual_stages: int) -> list[list[Work]]:
    """Interleaved 1F1B (Narayanan et al. 2021, section 2.2.2), stages go round the ranks in a loop.

    Micro-batches go through the virtual stages of a rank in groups of as many as there are ranks;
    what does not divide joins the last group. A step of fewer micro-batches than ranks is one
    group, with all its forwards first.
    """
    p, m = ranks, micro_batches
    groups = [p] * (m // p - 1) + [p + m % p] if m >= p else [m]
    orders = []
    for rank in range(p):
        forwards: list[int] = []
        backwards: list[int] = []
        first = 0
        for size in groups:
            for turn in range(virtual_stages):
                there = (turn * p + rank) * m + first
                back = ((virtual_stages - 1 - turn) * p + rank) * m + first
                forwards += range(there, there + size)
                backwards += range(back, back + size)
            first += size
        warmup = 2 * (p - rank - 1) + (virtual_stages - 1) * groups[-1]
        orders.append(_alternate(forwards, backwards, warmup if m >= p else m * virtual_stages))
    return orders


def _units(stage: int, micro_batches: int) -> range:
    return range(stage * micro_batches, (stage + 1) * micro_batches)


def _alternate(forwards: Sequence[int], backwards: Sequence[int], warmup: int) -> list[Work]:
    """Forwards for the warm-up, then forward and backward in turn, then the other backwards."""
    warmup = min(warmup, len(forwards))
    order = [(FORWARD, u) for u in forwards[:warmup]]
    steady = len(forwards) - warmup
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        order += [(FORWARD, forward), (BACKWARD, backward)]
    return order + [(BACKWARD, u) for u in backwards[steady:]]
