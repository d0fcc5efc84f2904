"""Numbers of gradients, such as norms: what a rank adds to them, and what they are of the whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from merakc.train.parameters.norms import INFINITE, Owners

NORMS = {"norm", "linalg_norm", "linalg_vector_norm", "vector_norm"}
REDUCTIONS = {"sum", "mean", "max", "amax", "min", "amin", "any", "all", "count_nonzero"}


@dataclass(frozen=True, eq=False)
class Source:
    """The parameter that a gradient is of; `is_part` where this rank holds not all of it."""

    name: str
    owners: Owners
    numel: int  # of the whole
    is_part: bool

    def __deepcopy__(self, _: object) -> Source:
        return self


@dataclass(frozen=True)
class Kind:
    """How numbers of ranks become that of the whole: combined, then its root or its mean."""

    combine: str
    root: float = 1.0
    divisor: int = 1

    def finish(self, value: torch.Tensor) -> torch.Tensor:
        """The number of the whole."""
        value = value / self.divisor if self.divisor > 1 else value
        return value if self.root == 1.0 else value.pow(1 / self.root)


@dataclass(frozen=True)
class Term:
    """This rank's share of a number of one gradient: float64, before its root is taken."""

    source: Source
    own: torch.Tensor
    kind: Kind
    dtype: torch.dtype


def kind_of(
    name: str, gradient: torch.Tensor, numel: int, rest: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Kind, Callable[[torch.Tensor], torch.Tensor]] | None:
    """How a number of a gradient is made of ranks' numbers, and how each is; None where the call
    reduces some dims alone, or is no such number.
    """
    given = {k: v for k, v in kwargs.items() if v is not None and v is not False and k != "dtype"}
    if name in NORMS:
        order = given.pop("ord", given.pop("p", None))
        if rest:
            order, rest = rest[0], [x for x in rest[1:] if x is not None and x is not False]
        order, norm = 2 if order in (None, "fro") else order, torch.linalg.vector_norm
        if given or rest or not isinstance(order, (int, float)) or gradient.is_complex():
            return None
        if name == "linalg_norm" and order != 2 and gradient.dim() > 1:
            return None  # of a matrix
        order = float(order)
        if abs(order) == INFINITE:
            return Kind("max" if order > 0 else "min"), lambda g: norm(g, order)
        if order == 0:
            return Kind("sum"), torch.count_nonzero
        return Kind("sum", order), lambda g: norm(g, order).double().pow(order)
    if given or rest or gradient.is_complex():
        return None
    numbers: dict[str, tuple[Kind, Callable[[torch.Tensor], torch.Tensor]]] = {
        "sum": (Kind("sum"), torch.sum),
        "mean": (Kind("sum", divisor=numel), torch.sum),
        "max": (Kind("max"), torch.max), "amax": (Kind("max"), torch.max),
        "min": (Kind("min"), torch.min), "amin": (Kind("min"), torch.min),
        "any": (Kind("max"), torch.any), "all": (Kind("min"), torch.all),
        "count_nonzero": (Kind("sum"), torch.count_nonzero),
    }  # fmt: skip
    return numbers[name]


def total(terms: Iterable[Term], kind: Kind) -> torch.Tensor:
    """One number of all, communicated once for each model."""
    terms = list(terms)
    values = []
    for owners in dict.fromkeys(t.source.owners for t in terms):
        own: dict[str, torch.Tensor] = {}
        for t in (t for t in terms if t.source.owners is owners):
            name = t.source.name
            before = own.get(name)
            if before is None:
                own[name] = t.own
            else:
                pair = torch.stack([before, t.own])
                own[name] = pair.sum() if kind.combine == "sum" else getattr(pair, kind.combine)()
        values.append(owners.total(own, kind.combine))
    joined = torch.stack(values)
    found = joined.sum() if kind.combine == "sum" else getattr(joined, kind.combine)()
    return kind.finish(found).to(terms[0].dtype)


def values_of(terms: Sequence[Term]) -> list[torch.Tensor]:
    """The numbers of the whole, one of each term; communicated together."""
    found: dict[int, torch.Tensor] = {}
    left = list(enumerate(terms))
    while left:
        _, first = left[0]
        taken: dict[str, int] = {}
        for k, t in left:
            if t.source.owners is first.source.owners and t.kind.combine == first.kind.combine:
                taken.setdefault(t.source.name, k)
        own = {name: terms[k].own for name, k in taken.items()}
        every = first.source.owners.each(own, first.kind.combine)
        for name, k in taken.items():
            term = terms[k]
            value = every[first.source.owners.place[name]]
            found[k] = term.kind.finish(value).to(term.dtype)
        left = [(k, t) for k, t in left if k not in found]
    return [found[k] for k in range(len(terms))]
