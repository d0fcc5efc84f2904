"""Factors: what the dims of all tensors are made of.

A dim is a list of factors, outermost first, whose sizes multiply to the dim's. Ops say which dims
are the same; equal factors are merged (union-find), and a factor is divided where a view or
another dim divides it. Where an op cuts a dim in unequal parts (a packed projection of queries,
keys and values), its factor becomes a row of segments, which are dims of their own. A factor that
an op needs whole is blocked, with the reason.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import accumulate

from merakc.ir.layout import DimFactor, Layout


class Factor:
    """One factor; its representative carries the facts."""

    __slots__ = ("blocked", "parent", "parts", "segments", "size")

    def __init__(self, size: int, blocked: str = "") -> None:
        self.parent: Factor = self
        self.size = size
        self.parts: Dim = []  # what it was divided into
        self.segments: list[Dim] = []  # what it is a row of
        self.blocked = blocked

    def root(self) -> Factor:
        """The representative of all factors merged with this one."""
        found = self
        while found.parent is not found:
            found.parent = found.parent.parent
            found = found.parent
        return found


Dim = list[Factor]


def new_dim(size: int, blocked: str = "") -> Dim:
    """A dim of one new factor; a dim of size 1 has none."""
    return [] if size == 1 else [Factor(size, blocked)]


def leaves(dim: Iterable[Factor]) -> Dim:
    """The undivided factors of a dim, in order."""
    found: Dim = []
    for factor in dim:
        root = factor if factor.parent is factor else factor.root()
        if root.parts:
            found += leaves(root.parts)
        else:
            found.append(root)
    return found


def atoms(dim: Iterable[Factor]) -> Dim:
    """The undivided factors of a dim, and in the place of a segmented one those of its segments."""
    found: Dim = []
    for factor in leaves(dim):
        if factor.segments:
            found += [a for s in factor.segments for a in atoms(s)]
        else:
            found.append(factor)
    return found


def block(dim: Iterable[Factor], why: str) -> None:
    """Says that every factor of the dim is needed whole."""
    for factor in atoms(dim):
        factor.blocked = factor.blocked or why


def size(dim: Iterable[Factor]) -> int:
    """The dim's full size."""
    return math.prod(f.size for f in leaves(dim))


def divide(factor: Factor, outer: int) -> bool:
    """Divides an undivided factor into `outer` x the rest; False where it does not divide."""
    root = factor.root()
    assert not root.parts
    if root.size % outer or root.segments:
        return False
    root.parts = [Factor(outer, root.blocked), Factor(root.size // outer, root.blocked)]
    return True


def unify(first: Dim, second: Dim) -> None:
    """Says that two dims of one size are the same, dividing factors until they match."""
    left, right = leaves(first), leaves(second)
    assert size(left) == size(right), "unified dims must have one size"
    while left and right:
        a, b = left[0].root(), right[0].root()
        if a.parts or b.parts:
            left[:1], right[:1] = leaves([a]), leaves([b])
            continue
        if a is b or a.size == b.size:
            _merge(a, b)
            del left[0], right[0]
            continue
        large, small = (a, b) if a.size > b.size else (b, a)
        if not divide(large, small.size):
            block([*left, *right], "dims that divide differently")
            return


def _merge(a: Factor, b: Factor) -> None:
    if a is b:
        return
    if b.segments and not a.segments:
        a, b = b, a
    if b.segments:
        for bound in _bounds(a):
            cut_at([b], bound)
        for bound in _bounds(b):
            cut_at([a], bound)
        if _bounds(a) == _bounds(b):
            for first, second in zip(segments_of(a), segments_of(b), strict=True):
                unify(first, second)
        else:
            block([a, b], "dims cut in different parts")
    if b.blocked:
        block([a], b.blocked)
    b.parent = a


def segments_of(factor: Factor) -> list[Dim]:
    """The segments of a factor, those of segments included; a plain one is its own."""
    if not factor.segments:
        return [[factor]]
    found: list[Dim] = []
    for segment in factor.segments:
        own = leaves(segment)
        found += segments_of(own[0]) if len(own) == 1 else [own]
    return found


def _bounds(factor: Factor) -> list[int]:
    return [0, *accumulate(size(s) for s in segments_of(factor))]


def cut_at(dim: Iterable[Factor], offset: int) -> bool:
    """Lets a segment begin at `offset` of a dim; False where the dim is divided otherwise."""
    if offset in (0, size(dim)):
        return True
    own = leaves(dim)
    if len(own) != 1:
        return False
    factor = own[0]
    if not factor.segments:
        lengths = offset, factor.size - offset
        factor.segments = [new_dim(length, factor.blocked) for length in lengths]
        return True
    start = 0
    for segment in factor.segments:
        end = start + size(segment)
        if start <= offset <= end:
            return cut_at(segment, offset - start)
        start = end
    raise AssertionError("an offset beyond the dim")


def piece(dim: Dim, start: int, end: int) -> Dim | None:
    """The part of a dim from `start` to `end`; None where the dim is divided otherwise."""
    if (start, end) == (0, size(dim)):
        return dim
    if not (cut_at(dim, start) and cut_at(dim, end)):
        return None
    (factor,) = leaves(dim)
    bounds = _bounds(factor)
    inside = segments_of(factor)[bounds.index(start) : bounds.index(end)]
    if len(inside) == 1:
        return inside[0]
    joined = Factor(end - start)
    joined.segments = inside
    return [joined]


def regroup(dims: list[Dim], shape: tuple[int, ...]) -> list[Dim] | None:
    """The dims of a reshape to `shape`, or None where factors do not divide that way."""
    if 0 in shape:  # nothing divides it
        return None
    rest = [f for dim in dims for f in leaves(dim)]
    found: list[Dim] = []
    for target in shape:
        dim: Dim = []
        need = target
        while need > 1:
            if not rest:
                return None
            factor = rest[0].root()
            if factor.parts:
                rest[:1] = leaves([factor])
            elif need % factor.size == 0:
                dim.append(factor)
                need //= factor.size
                del rest[0]
            elif factor.size < need or not divide(factor, need):
                return None
        found.append(dim)
    return None if rest else found


def layout(dims: list[Dim], shape: tuple[int, ...], split: set[Factor]) -> Layout:
    """The layout of a tensor once it is decided which factors are split."""
    return Layout(
        tuple(
            _dim_factors(dim, split) or (DimFactor(full),)
            for dim, full in zip(dims, shape, strict=True)
        )
    )


def _dim_factors(dim: Dim, split: set[Factor]) -> tuple[DimFactor, ...]:
    """A dim's factors, neighbours that are not split joined."""
    found: list[DimFactor] = []
    for factor in leaves(dim):
        if factor.segments and not split.isdisjoint(atoms([factor])):
            parts = tuple(_dim_factors(s, split) or (DimFactor(1),) for s in segments_of(factor))
            found.append(DimFactor(factor.size, True, parts))
        elif factor in split:
            found.append(DimFactor(factor.size, True))
        elif found and not found[-1].split:
            found[-1] = DimFactor(found[-1].size * factor.size)
        else:
            found.append(DimFactor(factor.size))
    return tuple(found)
