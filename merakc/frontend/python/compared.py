"""Forwards that a second one was compared with, and those of other batches that do the same.

What is known of how their numbers grow with the samples gives the forward of a part of a batch from
that of the whole, without running it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations_with_replacement, product
from math import prod
from typing import Any

from torch import nn

from merakc.frontend.python.content import content_hash
from merakc.frontend.python.views import Views
from merakc.frontend.python.watch import WatchedState
from merakc.ir.graph import Graph, InputKind, Node, TensorSpec

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


@dataclass(frozen=True, slots=True)
class _Growing:
    """The calls of a forward, and which of the whole numbers in them grow as the samples do."""

    calls: tuple[Any, ...]
    grows: tuple[bool, ...]


@dataclass(slots=True)
class Compared:
    """Forwards of a model of which a second one was the same.

    What a second one finds is what comes from outside: a clock, a file, a counter. A forward of
    another batch that makes the same calls from the same lines shows it too: by a number that is
    neither the same there nor the same function of the sizes of its batch.
    """

    known: list[_Forward] = field(default_factory=list)
    growing: list[_Growing] = field(default_factory=list)
    state: WatchedState | None = None  # of the model, when one was recorded last
    views: Views = field(default_factory=Views)

    def state_of(self, model: nn.Module) -> WatchedState:
        """What the model's Python holds now."""
        self.state = self.state.again(model) if self.state is not None else WatchedState(model)
        return self.state

    def forget(self) -> None:
        """Lets go of what the model's Python held: its tensors among it."""
        self.state = None

    def add(self, graph: Graph) -> None:
        """One that was compared."""
        self.known = [*self.known[1 - MOST :], graph.told(_forward)]

    def explain(self, graph: Graph) -> bool:
        """Whether a forward is one of them, for the sizes of its own batch."""
        return any(_follows(graph.told(_forward), known) for known in self.known)

    def learn(self, part: Graph, samples: int, whole: Graph, total: int) -> None:
        """How the numbers of a forward grow with the samples, from recordings of so many."""
        own, other = part.told(_forward), whole.told(_forward)
        if own.calls != other.calls or any(g.calls == own.calls for g in self.growing):
            return
        pairs = list(zip(own.numbers, other.numbers, strict=True))
        if all(a == b or a * total == b * samples for a, b in pairs):
            # Of the calls that are known already, if they are: a tuple of them is large.
            calls = next((k.calls for k in self.known if k.calls == own.calls), own.calls)
            found = _Growing(calls, tuple(a != b for a, b in pairs))
            self.growing = [*self.growing[1 - MOST :], found]

    def part_of(self, whole: Graph, samples: int, total: int) -> Graph | None:
        """The forward of so many of the samples of a batch, from that of all of them.

        Of calls of which both were recorded before: the numbers that grew with the samples there
        are smaller, all others are the whole batch's. None where they are not known, or not even.
        """
        own = whole.told(_forward) if self.growing else None
        known = next((g for g in self.growing if own is not None and g.calls == own.calls), None)
        if own is None or known is None:
            return None
        pairs = list(zip(own.numbers, known.grows, strict=True))
        if any(grows and n * samples % total for n, grows in pairs):
            return None
        return _renumbered(whole, iter([n * samples // total if g else n for n, g in pairs]))


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
        if type(value) is tuple:
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


def _renumbered(graph: Graph, numbers: Iterator[int]) -> Graph:
    """The same calls with other whole numbers, in the order of `_forward`."""

    def now(value: Any) -> Any:
        if type(value) is int:
            return next(numbers)
        return tuple([now(v) for v in value]) if type(value) is tuple else value

    def sized(spec: TensorSpec | None) -> TensorSpec | None:
        return spec and TensorSpec(now(spec.shape), spec.dtype)

    inputs = tuple([replace(i, spec=TensorSpec(now(i.spec.shape), i.spec.dtype))
                    for i in graph.inputs])  # fmt: skip
    nodes = tuple([
        Node(n.name, n.op, now(n.args), now(n.kwargs), tuple(map(sized, n.outputs)),
             module=n.module, source=n.source, grad=n.grad)
        for n in graph.nodes
    ])  # fmt: skip
    return Graph(inputs, nodes, graph.outputs, graph.constants, graph.functions)
