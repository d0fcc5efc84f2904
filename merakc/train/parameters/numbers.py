"""Numbers of gradients, such as norms: what a rank adds to them, and what they are of the whole."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from merakc.errors import ConfigError
from merakc.runtime.part import Place
from merakc.train.parameters.norms import INFINITE, Owners

NORMS = {"norm", "linalg_norm", "linalg_vector_norm", "vector_norm"}
# Python's names of pointwise calls that are not those of torch's ops.
_PYTHON = {"truediv": "div", "floordiv": "floor_divide", "and": "bitwise_and", "or": "bitwise_or"}
REDUCTIONS = {"sum", "mean", "max", "amax", "min", "amin", "any", "all", "count_nonzero"}
# Calls whose result has the elements of their argument, in other memory or of another dtype.
COPIES = {
    "clone", "to", "_to_copy", "float", "double", "half", "bfloat16", "int", "long", "bool", "cpu",
    "cuda", "contiguous", "type", "type_as", "pin_memory", "zeros_like", "ones_like", "empty_like",
    "full_like", "new_empty_strided", "detach", "data", "alias", "positive",
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Source:
    """A parameter: the shape of the whole, and of what this rank has; `is_part` where that is not
    all of it, and then its place, unless other pipeline ranks hold it.
    """

    name: str
    owners: Owners
    shape: tuple[int, ...]
    held: tuple[int, ...]
    is_part: bool
    place: Place | None = None

    @property
    def numel(self) -> int:
        """The elements of the whole."""
        return math.prod(self.shape)

    @property
    def is_everywhere(self) -> bool:
        """Whether every rank has all of it."""
        place = self.owners.placements.get(self.name)
        some = place is not None and len(place.ranks) < self.owners.groups.mesh.pp
        return not (self.is_part or some)

    def is_like(self, other: Source) -> bool:
        """Whether this rank has the same elements of both: of one parameter, or of that of a copy
        of the model, or of two that lie alike, as those of a network and of its average.
        """
        if self is other:
            return True
        own, others = ((s.shape, s.held, s.place and s.place.elements) for s in (self, other))
        return self.owners.groups is other.owners.groups and own == others

    def part(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a whole tensor. Raises `ConfigError` for another shape."""
        if tuple(whole.shape) != self.shape:
            raise ConfigError(
                f"'{self.name}' is given as {tuple(whole.shape)}, and the whole is {self.shape}"
            )
        own = whole.new_empty(self.held) if self.place is None else self.place.take(whole)
        return own.contiguous().view(self.held)

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
        if self.root == 1.0:
            return value
        positive = value > 0  # where it is zero no gradient goes through, as in torch
        return torch.where(positive, torch.where(positive, value, 1.0).pow(1 / self.root), value)


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
        is_matrix = name == "linalg_norm" and order not in (None, "fro") and gradient.dim() > 1
        order, norm = 2 if order in (None, "fro") else order, torch.linalg.vector_norm
        is_number = isinstance(order, (int, float))
        if given or rest or is_matrix or not is_number:
            return None
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
        values.append(
            _with_gradient(owners.total(_detached(own), kind.combine), own.values(), kind)
        )
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
        every = first.source.owners.each(_detached(own), first.kind.combine)
        for name, k in taken.items():
            term = terms[k]
            value = every[first.source.owners.place[name]]
            value = _with_gradient(value, [term.own], term.kind)
            found[k] = term.kind.finish(value).to(term.dtype)
        left = [(k, t) for k, t in left if k not in found]
    return [found[k] for k in range(len(terms))]


def _detached(own: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.detach() for name, value in own.items()}


def _with_gradient(value: torch.Tensor, own: Iterable[torch.Tensor], kind: Kind) -> torch.Tensor:
    """The number of all ranks, whose gradient goes to this rank's elements: to those that others
    hold too as well, so that all copies get the same.
    """
    held = [x for x in own if x.requires_grad]
    if not held:
        return value
    if kind.combine != "sum":
        return _Extreme.apply(value, *held)  # type: ignore[no-untyped-call, no-any-return]
    local = torch.stack(held).sum()
    return local + (value - local).detach()


class _Extreme(torch.autograd.Function):
    """A largest or smallest element, of which no rank knows whether it is its own."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        """The same."""
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """Refuses."""
        raise ConfigError(
            "a loss has a largest or smallest element of parameters that ranks hold parts of, "
            "which no gradient goes through; use a norm or a sum"
        )


@cache
def is_pointwise(name: str) -> bool:
    """Whether torch says of an op of this name that it computes element by element."""
    names = [name]
    if name.startswith("__"):
        name = name.strip("_")
        names = [name, name[1:]] if name[:1] in "ri" else [name]
    elif name.endswith("_"):  # torch does not say so of all that write
        names.append(name[:-1])
    for known in names:
        packet = getattr(torch.ops.aten, _PYTHON.get(known, known), None)
        if packet is not None and hasattr(packet, "overloads"):
            tags = getattr(packet, packet.overloads()[0]).tags
            if torch.Tag.pointwise in tags:
                return torch.Tag.nondeterministic_seeded not in tags
    return False


def spreads(tensor: torch.Tensor, whole: tuple[int, ...]) -> bool:
    """Whether it would be broadcast with the whole."""
    try:
        return bool(torch.broadcast_shapes(tensor.shape, whole))  # type: ignore[no-untyped-call]
    except RuntimeError:
        return False
