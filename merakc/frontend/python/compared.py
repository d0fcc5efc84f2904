"""Forwards that a second one was compared with, and those of other batches that do the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations_with_replacement, product
from math import prod
from typing import Any

from torch import nn

from merakc.frontend.python.content import content_hash
from merakc.frontend.python.watch import WatchedState
from merakc.ir.graph import Graph, InputKind

MOST = 8  # forwards that are kept, each of other calls
MOST_FACTORS = 3  # sizes in a product: those of what attention draws, say
Pair = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Forward:
    """A forward's calls, with their lines, and apart from them the whole numbers in them; `sizes`
    are those of its batch.
    """

    calls: tuple[Any, ...]
    numbers: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(slots=True)
class Compared:
    """Forwards of a model of which a second one was the same.

    What a second one finds is what comes from outside: a clock, a file, a counter. A forward of
    another batch that makes the same calls from the same lines shows it too: by a number that is
    neither the same there nor the same function of the sizes of its batch.
    """

    known: list[_Forward] = field(default_factory=list)
    state: WatchedState | None = None  # of the model, when one was recorded last

    def state_of(self, model: nn.Module) -> WatchedState:
        """What the model's Python holds now."""
        self.state = self.state.again(model) if self.state is not None else WatchedState(model)
        return self.state

    def add(self, graph: Graph) -> None:
        """One that was compared."""
        self.known = [*self.known[1 - MOST :], _forward(graph)]

    def explain(self, graph: Graph) -> bool:
        """Whether a forward is one of them, for the sizes of its own batch."""
        own = _forward(graph) if self.known else None
        return own is not None and any(_follows(own, known) for known in self.known)


def _follows(own: _Forward, known: _Forward) -> bool:
    """Whether two forwards differ in nothing but functions of the sizes of their batches."""
    if own.calls != known.calls:
        return False
    terms = _terms(list(dict.fromkeys(zip(own.sizes, known.sizes, strict=True))))
    pairs = {(a, b) for a, b in zip(own.numbers, known.numbers, strict=True) if a != b}
    return all(_is_function(pair, terms) for pair in pairs)


def _terms(sizes: Sequence[Pair]) -> list[Pair]:
    """What numbers may be multiples of, in both forwards: sizes, one more or less, and products."""
    near = [(a + k, b + k) for a, b in sizes for k in (0, 1, -1)]
    products = [
        tuple(map(prod, zip(*some, strict=True)))
        for some in (*product(near, sizes), *combinations_with_replacement(sizes, MOST_FACTORS))
    ]
    return [(x, y) for x, y in (*near, *products) if x > 0 and y > 0]


def _is_function(pair: Pair, terms: Sequence[Pair]) -> bool:
    """Whether two numbers are the same multiple of a term."""
    a, b = pair
    return any(a % x == 0 and b % y == 0 and a // x == b // y for x, y in terms)


def _forward(graph: Graph) -> _Forward:
    numbers: list[int] = []

    def told(value: Any) -> Any:
        """The value, with what is no part of the calls taken out of it."""
        if type(value) is int:
            numbers.append(value)
            return int
        if isinstance(value, tuple):
            return tuple([told(v) for v in value])
        return repr(value) if isinstance(value, float) else value  # 1.0 is equal to True

    inputs = [(i.kind, i.name, i.target, told(i.spec.shape), i.spec.dtype) for i in graph.inputs]
    constants = [(name, content_hash(x)) for name, x in graph.constants.items()]
    calls = [
        (n.name, n.op, told(n.args), told(n.kwargs), n.module, n.source, n.grad,
         *[None if s is None else (told(s.shape), s.dtype) for s in n.outputs])
        for n in graph.nodes
    ]  # fmt: skip
    sizes = tuple(n for i in graph.inputs if i.kind is InputKind.BATCH for n in i.spec.shape)
    rest = (*inputs, *constants, *graph.outputs)
    return _Forward((*calls, *rest), tuple(numbers), sizes)
