"""The pieces of a model for any number of samples, from those for two numbers of them.

What a kernel computes and moves grows by the same amount with every sample, and so does each of its
sizes: two recordings say of all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from merakc.costs.work.kernels import Kernel, Work
from merakc.costs.work.pieces import Piece

# Samples of the two recordings: more than one, since a dim of size 1 is often another case, and of
# numbers that make no size of a model by chance, so that kernels are alike where their ops are.
SAMPLES = (5, 7)


def scaled(pieces: Sequence[Sequence[Piece]], samples: int) -> tuple[Piece, ...] | None:
    """The pieces for `samples`, from those for `SAMPLES`; None where the two are not alike.

    Equal blocks come out as one value many times.
    """
    fewer, more = pieces
    if len(fewer) != len(more):
        return None
    steps = samples - SAMPLES[0]
    known: dict[object, Piece] = {}
    found = []
    for one, other in zip(fewer, more, strict=True):
        key = _kind(one), _kind(other)
        own = known.get(key) if one.path else None
        if own is None:
            own = _piece(one, other, steps)
            if own is None:
                return None
            known[key] = own
        found.append(own)
    return tuple(found)


def _kind(piece: Piece) -> object:
    """What equal blocks have in common."""
    works = (tuple(own.items()) for own in (piece.work.forward, piece.work.backward))
    numbers = piece.parameter_count, piece.saved_bytes, piece.handed_bytes
    return piece.path, numbers, *works


def _piece(one: Piece, other: Piece, steps: int) -> Piece | None:
    forward = _kernels(one.work.forward, other.work.forward, steps)
    backward = _kernels(one.work.backward, other.work.backward, steps)
    if one.path != other.path or forward is None or backward is None:
        return None
    saved_bytes = _at(one.saved_bytes, other.saved_bytes, steps)
    handed_bytes = _at(one.handed_bytes, other.handed_bytes, steps)
    return Piece(one.path, Work(forward, backward), one.parameters, saved_bytes, handed_bytes)


def _kernels(one: Counter[Kernel], other: Counter[Kernel], steps: int) -> Counter[Kernel] | None:
    if len(one) != len(other):
        return None
    found: Counter[Kernel] = Counter()
    for (a, count), (b, again) in zip(one.items(), other.items(), strict=True):
        if (a.kind, a.op, a.dtype, count) != (b.kind, b.op, b.dtype, again):
            return None
        w, x, y, z = (_at(p, q, steps) for p, q in zip(a.shape, b.shape, strict=True))
        flops, moved = (
            _at(a.flops, b.flops, steps),
            _at(a.traffic_bytes, b.traffic_bytes, steps),
        )
        found[Kernel(a.kind, flops, moved, (w, x, y, z), a.dtype, a.op)] += count
    return found


def _at(one: int, other: int, steps: int) -> int:
    return max(one + steps * (other - one) // (SAMPLES[1] - SAMPLES[0]), 0)
