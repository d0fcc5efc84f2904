"""The pieces of a model for any number of samples, from those for two numbers of them.

What a kernel computes and moves grows by the same amount with every sample, and so does each of its
sizes: two recordings say of all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from merakc.costs.work.kernels import Kernel, Work
from merakc.costs.work.pieces import Piece

# Samples of the two recordings: more than one, since a dim of size 1 is often another case. Plans
# are mostly of so few, so that they need no others.
SAMPLES = (2, 4)
# Those of which neither divides over ranks that one of the former does.
ODD_SAMPLES = (3, 5)
SIZES = ("saved_bytes", "handed_bytes", "gradient_bytes", "deferred_bytes")


def scaled(
    pieces: Sequence[Sequence[Piece]], samples: int, recorded: tuple[int, int] = SAMPLES
) -> tuple[Piece, ...] | None:
    """The pieces for `samples`, from those for the `recorded` ones, which are two more than the
    first; None where the two are not alike.

    Equal blocks come out as one value many times.
    """
    fewer, more = pieces
    if len(fewer) != len(more):
        return None
    steps = samples - recorded[0]
    known: dict[object, Piece] = {}
    found = []
    for one, other in zip(fewer, more, strict=True):
        ids = id(one), id(other)  # equal blocks are mostly one value already
        own = known.get(ids) if one.path else None
        if own is None:
            key = _kind(one), _kind(other)
            own = known.get(key) if one.path else None
            own = own or _piece(one, other, steps)
            if own is None:
                return None
            known[ids] = known[key] = own
        found.append(own)
    return tuple(found)


def _kind(piece: Piece) -> object:
    """What equal blocks have in common."""
    numbers = piece.parameter_count, piece.saved_bytes, piece.handed_bytes
    return piece.path, numbers, *map(tuple, piece.work.listed)


def _piece(one: Piece, other: Piece, steps: int) -> Piece | None:
    pairs = zip(one.work.listed, other.work.listed, strict=True)
    kernels = [own for pair in pairs if (own := _kernels(*pair, steps)) is not None]
    if one.path != other.path or len(kernels) < len(one.work.listed):
        return None
    sizes: dict[str, Any] = {
        name: _at(getattr(one, name), getattr(other, name), steps) for name in SIZES
    }
    forward, backward, weight_grad = kernels
    return replace(one, work=Work(forward, backward, weight_grad), **sizes)


def _kernels(one: Sequence[Kernel], other: Sequence[Kernel], steps: int) -> Counter[Kernel] | None:
    if len(one) != len(other):
        return None
    found: Counter[Kernel] = Counter()
    for a, b in zip(one, other, strict=True):
        if (a.kind, a.op, a.axis, a.dtype) != (b.kind, b.op, b.axis, b.dtype):
            return None
        w, x, y, z = (_at(p, q, steps) for p, q in zip(a.shape, b.shape, strict=True))
        flops = _at(a.flops, b.flops, steps)
        moved_bytes = _at(a.traffic_bytes, b.traffic_bytes, steps)
        found[a._replace(flops=flops, traffic_bytes=moved_bytes, shape=(w, x, y, z))] += 1
    return found


def _at(one: int, other: int, steps: int) -> int:
    return max(one + steps * (other - one) // (SAMPLES[1] - SAMPLES[0]), 0)
