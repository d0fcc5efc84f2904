"""How one tensor is split over the ranks that have parts of weights, those of tp unless said.

A dim is a product of factors, outermost first: GPT-2's packed `c_attn` weight `[768, 2304]` has
dims `768` and `3 12* 64`, and the star says that the factor of 12 heads is split over tp. A rank
holds, of each split factor, the same block that `torch.tensor_split` would give it, so sizes need
not divide evenly. A factor may be a row of segments that are split each on its own: Phi-3's packed
projection of 32 query and twice 8 key heads has the dim `(32*·96+8*·96+8*·96)`. Or one rank holds
all of it, and the others nothing: the parameter of one expert, on rank 1, has the dim `256@1`.

Where two axes split weights, a factor says over which ranks: `8*2/4 x 64*4` is a tensor of 8 ranks,
of which those 4 apart have 4 of 8 experts each, and neighbours a quarter of 64 units.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch


class Axis(NamedTuple):
    """An axis of several: how many ranks it has, and how far apart neighbours on it are."""

    ranks: int
    apart: int

    def at(self, rank: int) -> int:
        """The place on the axis of a rank among those of all axes."""
        return rank // self.apart % self.ranks

    def __str__(self) -> str:
        return f"{self.ranks}/{self.apart}" if self.apart > 1 else str(self.ranks)


@dataclass(frozen=True, slots=True)
class DimFactor:
    """One factor of a dim: its full size, and whether it is split, over all ranks or `along` one
    axis of several.

    With `segments`, it is their concatenation, each a product of factors of its own. One that is
    split may be whole `on` one rank.
    """

    size: int
    split: bool = False
    segments: tuple[tuple[DimFactor, ...], ...] = ()
    on: int | None = None
    along: Axis | None = None

    def bounds(self, tp: int, rank: int) -> tuple[int, int]:
        """The half-open block of this factor that rank `rank` of `tp` holds."""
        assert not self.segments, "segments have no common bounds"
        if self.along is not None:
            tp, rank = self.along.ranks, self.along.at(rank)
        if self.on is not None:
            return 0, self.size if rank == self.on else 0
        return block_bounds(self.size, tp, rank) if self.split else (0, self.size)

    def index(self, tp: int, rank: int) -> torch.Tensor:
        """This factor's indices that rank `rank` holds: int64 `[local size]`."""
        if not self.segments:
            return torch.arange(*self.bounds(tp, rank))
        starts = accumulate((math.prod(f.size for f in s) for s in self.segments), initial=0)
        found = [_index(s, tp, rank) + k for s, k in zip(self.segments, starts, strict=False)]
        return torch.cat(found)

    def local_size(self, tp: int, rank: int) -> int:
        """How many of its indices rank `rank` holds."""
        if self.segments:
            return sum(math.prod(f.local_size(tp, rank) for f in s) for s in self.segments)
        start, end = self.bounds(tp, rank)
        return end - start

    def __str__(self) -> str:
        if self.segments:
            return "(" + "+".join(map(_dim_text, self.segments)) + ")"
        star = "*" if self.split and (self.on is None or self.along) else ""
        on = "" if self.on is None else f"@{self.on}"
        return f"{self.size}{on}{star}{self.along or ''}"

    @property
    def axes(self) -> frozenset[Axis | None]:
        """The axes over which it is split; None stands for all ranks."""
        if self.segments:
            return frozenset[Axis | None]().union(*(f.axes for s in self.segments for f in s))
        return frozenset([self.along] if self.split else [])

    def within(self, axis: Axis) -> DimFactor:
        """The same, with what is split over all ranks split along one axis of several."""
        segments = tuple(tuple(f.within(axis) for f in s) for s in self.segments)
        return replace(self, segments=segments, along=axis if self.split and not segments else None)

    def part(self, axis: Axis) -> DimFactor:
        """How the ranks of one axis split it, as if there were no other."""
        segments = tuple(tuple(f.part(axis) for f in s) for s in self.segments)
        if axis not in self.axes:
            return DimFactor(self.size)
        return replace(self, segments=segments, along=None)


@dataclass(frozen=True, slots=True)
class Layout:
    """The factors of each dim of a tensor."""

    dims: tuple[tuple[DimFactor, ...], ...]

    @property
    def is_split(self) -> bool:
        """Whether any dim is split."""
        return any(map(_is_split, self.dims))

    @property
    def shape(self) -> tuple[int, ...]:
        """The full shape."""
        return tuple(math.prod(f.size for f in dim) for dim in self.dims)

    @property
    def numel(self) -> int:
        """The full number of elements."""
        return math.prod(self.shape)

    def holder(self, rank: int) -> int:
        """The first rank that has the same part as this one."""
        axes = self.axes
        if None in axes:
            return rank
        return sum(axis.at(rank) * axis.apart for axis in axes if axis)

    def is_apart(self, axis: Axis) -> bool:
        """Whether ranks along an axis have parts of their own: if it is split along it, or over all
        ranks.
        """
        return not self.axes.isdisjoint((None, axis))

    def copies(self, ranks: int) -> int:
        """How many of so many ranks have the same part."""
        axes = self.axes
        return 1 if None in axes else ranks // math.prod(axis.ranks for axis in axes if axis)

    @property
    def axes(self) -> frozenset[Axis | None]:
        """The axes over which any dim is split; None stands for all ranks."""
        return frozenset[Axis | None]().union(*(f.axes for dim in self.dims for f in dim))

    def within(self, axis: Axis) -> Layout:
        """The same, with what is split over all ranks split along one axis of several."""
        return Layout(tuple(tuple(f.within(axis) for f in dim) for dim in self.dims))

    def part(self, axis: Axis) -> Layout:
        """How the ranks of one axis split it, as if there were no other."""
        return Layout(tuple(tuple(f.part(axis) for f in dim) for dim in self.dims))

    def crossed(self, inner: Layout, ranks: int, apart: int) -> Layout:
        """The layout of a tensor that so many ranks, so far apart, split as this one, and those
        between as the `inner` one: each dim once.
        """
        far, near = self.within(Axis(ranks, apart)), inner.within(Axis(apart, 1))
        pairs = list(zip(far.dims, near.dims, strict=True))
        assert not any(_is_split(a) and _is_split(b) for a, b in pairs), "two axes split one dim"
        return Layout(tuple(a if _is_split(a) else b for a, b in pairs))

    def beside(self, other: Layout) -> Layout:
        """The same, with what is whole on one rank said of a dim that the other does not split."""
        k = next((k for k, dim in enumerate(self.dims) if any(f.on is not None for f in dim)), None)
        if k is None or not _is_split(other.dims[k]):
            return self
        free = next(j for j, dim in enumerate(other.dims) if not _is_split(dim))
        dims = [(DimFactor(size),) for size in self.shape]
        dims[free] = (DimFactor(self.shape[free], True, on=self.dims[k][0].on),)
        return Layout(tuple(dims))

    def local_shape(self, tp: int, rank: int) -> tuple[int, ...]:
        """The shape that tp rank `rank` holds."""
        return tuple(math.prod(f.local_size(tp, rank) for f in dim) for dim in self.dims)

    def index(self, dim: int, tp: int, rank: int) -> torch.Tensor:
        """The full dim's indices that rank `rank` holds: int64 `[local size]`."""
        return _index(self.dims[dim], tp, rank)

    def order(self, dim: int, tp: int) -> tuple[tuple[int, ...], torch.Tensor | None]:
        """How many of the full dim's indices each rank holds, and these one rank behind the other;
        None where that is their own order.
        """
        return _order(self.dims[dim], tp)

    def take(self, full: torch.Tensor, tp: int, rank: int) -> torch.Tensor:
        """Rank `rank`'s part of a full tensor, a copy of its own."""
        part = full
        for k, dim in enumerate(self.dims):
            if _is_split(dim):
                part = part.index_select(k, self.index(k, tp, rank).to(part.device))
        return part.clone(memory_format=torch.contiguous_format)

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The full tensor from the parts of all tp ranks, in their order."""
        if not self.is_split:
            return parts[0]
        full = parts[0].new_empty(self.shape)
        for rank, part in enumerate(parts):
            grid = [self.index(k, len(parts), rank) for k in range(len(self.dims))]
            full[torch.meshgrid(*grid, indexing="ij")] = part
        return full

    def __str__(self) -> str:
        return " x ".join(map(_dim_text, self.dims))


def whole_layout(shape: Sequence[int]) -> Layout:
    """The layout of a tensor that is not split."""
    return Layout(tuple((DimFactor(size),) for size in shape))


def parse_layout(text: str) -> Layout:
    """The inverse of `str(layout)`; the text of a scalar is empty."""
    if not text:
        return Layout(())
    return Layout(tuple(map(_parse_dim, text.split(" x "))))


def _parse_dim(text: str) -> tuple[DimFactor, ...]:
    return tuple(map(_parse_factor, _outside_brackets(text, "·")))


def _parse_factor(text: str) -> DimFactor:
    if not text.startswith("("):
        before, star, axis = text.partition("*")
        ranks, _, apart = axis.partition("/")
        along = Axis(int(ranks), int(apart or 1)) if axis else None
        number, at, on = before.partition("@")
        return DimFactor(int(number), bool(star or at), on=int(on) if at else None, along=along)
    segments = tuple(map(_parse_dim, _outside_brackets(text[1:-1], "+")))
    size = sum(math.prod(f.size for f in s) for s in segments)
    return DimFactor(size, any(f.split for s in segments for f in s), segments)


def _outside_brackets(text: str, separator: str) -> list[str]:
    parts, depth = [""], 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if letter == separator and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def _is_split(dim: tuple[DimFactor, ...]) -> bool:
    return any(f.split for f in dim)


def _dim_text(dim: tuple[DimFactor, ...]) -> str:
    return "·".join(map(str, dim)) or "1"


def _index(dim: tuple[DimFactor, ...], tp: int, rank: int) -> torch.Tensor:
    found = torch.zeros(1, dtype=torch.long)
    for factor in dim:
        found = (found[:, None] * factor.size + factor.index(tp, rank)[None]).reshape(-1)
    return found


# The same few dims are moved in every layer of a model.
@lru_cache(maxsize=64)
def _order(dim: tuple[DimFactor, ...], tp: int) -> tuple[tuple[int, ...], torch.Tensor | None]:
    index = [_index(dim, tp, rank) for rank in range(tp)]
    order = torch.cat(index)
    is_own = torch.equal(order, torch.arange(len(order)))
    return tuple(map(len, index)), None if is_own else order


def block_sums(values: Sequence[float], parts: int) -> list[float]:
    """The sum of the values in each block of as many as `block_bounds` gives."""
    bounds = (block_bounds(len(values), parts, k) for k in range(parts))
    return [sum(values[start:end]) for start, end in bounds]


def block_bounds(size: int, parts: int, index: int) -> tuple[int, int]:
    """The block of `range(size)` that `torch.tensor_split` gives part `index` of `parts`."""
    small, extra = divmod(size, parts)
    start = index * small + min(index, extra)
    return start, start + small + (index < extra)
