"""The kinds of rows that the table of sharding rules (`rules.py`) is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

POINTWISE: Final = "pointwise"


@dataclass(frozen=True, slots=True)
class Along:
    """Keeps all dims; needs whole the dim(s) that the argument called `argument` names.

    The tensor arguments have one rank; the named dim may change its size. With `cut`, the result
    may be split along the dim all the same: every rank makes it whole and takes its part, as of
    the gates of experts.
    """

    argument: str = "dim"
    cut: bool = False


@dataclass(frozen=True, slots=True)
class Last:
    """Keeps the leading dims; needs the last `count` dims of its arguments whole."""

    count: int


@dataclass(frozen=True, slots=True)
class Reduce:
    """Removes the dims that the argument `dim` names, or all.

    `combine` says how parts add up where such a dim is split: as partial sums, as partial means
    (each weighted by its share of the elements), or not at all, so that the dims are needed whole.
    """

    combine: Literal["", "sum", "mean"] = ""


@dataclass(frozen=True, slots=True)
class Loss:
    """Elementwise, then summed, averaged or left alone as the argument `reduction` says."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A rule of its own, by name, in `merakc.passes.sharding.view_rules` or
    `merakc.passes.sharding.compute_rules`.
    """

    name: str


@dataclass(frozen=True, slots=True)
class Whole:
    """Kept whole on every rank, on purpose."""

    why: str


Row = str | Along | Last | Reduce | Loss | Shape | Whole
