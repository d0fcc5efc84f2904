"""What a value is to a batch in parts: its kind, and where its samples stand."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, Final, NamedTuple

from merakc.ir.batches import Rows
from merakc.ir.graph import Graph, Node, Ref, TensorSpec

SAMPLES: Final = "S"  # the samples, among the factors of a dim
Dim = tuple[int | str, ...]  # the factors of a dim, outermost first: sizes, and the samples
Dims = tuple[Dim, ...]


class Kind(StrEnum):
    """How the value of the whole batch follows from those of the parts."""

    CONSTANT = "constant"  # it is the same in every part
    ROWS = "rows"  # one dim holds samples, and each slice depends on its own sample alone
    SUM = "sum"  # it is the sum of the parts' values
    COUPLED = "coupled"  # in none of these ways


class State(NamedTuple):
    """What is known of a value.

    `dims` holds the factors of its dims; None where it is not known which of them are samples. A
    `known` value is of the batch alone: no parameter and no draw stands before it. Where it is
    `whole` too, only all samples together give it, before the step; its kind is then what a part
    sees of it. `routed` says of rows in the order of their experts what they are
    (`merakc.passes.batches.routed`). `why` names what couples.
    """

    kind: Kind
    dims: Dims | None = None
    known: bool = False
    whole: bool = False
    why: str = ""
    routed: tuple[object, ...] = ()

    @property
    def sampled(self) -> bool:
        """Whether a dim holds samples."""
        return self.dims is not None and any(SAMPLES in d for d in self.dims)

    @property
    def rows(self) -> Rows | None:
        """Where its samples stand; None where it has none, or in more than one dim."""
        holding = [k for k, d in enumerate(self.dims or ()) if SAMPLES in d]
        if len(holding) != 1:
            return None
        (dim,) = holding
        outer, inner = ends((self.dims or ())[dim])
        return Rows(dim, outer, inner)


Found = tuple[State | None, ...]


class Outcome(NamedTuple):
    """The states of a node's outputs, and how its call has to change in a part.

    `scaled`: a mean over samples, of which a part has its share. `once`: it is linear in several
    arguments together, so that its constant ones count once in all parts. `places`: the argument
    that holds places of samples, which a part counts for itself. `filled`: it puts the values of
    its last argument where its second is true, which has to be as often as a part has values.
    `picked`: it reads or writes places of the batch, of which each is in its own sample.
    `assumed`: what was taken to be so without proof.
    """

    states: Found
    scaled: bool = False
    once: bool = False
    places: int | None = None
    filled: bool = False
    picked: Any = None
    assumed: str = ""


def plain(shape: Sequence[int]) -> Dims:
    """The dims of a value without samples."""
    return tuple((n,) for n in shape)


def ends(dim: Dim) -> tuple[int, int]:
    """What stands outside and inside of the samples in a dim."""
    k = dim.index(SAMPLES)
    return _product(dim[:k]), _product(dim[k + 1 :])


def _product(factors: Sequence[int | str]) -> int:
    return math.prod(int(f) for f in factors)


def size(dim: Dim, samples: int) -> int:
    """The size of a dim for so many samples."""
    if len(dim) == 1:
        return samples if dim[0] == SAMPLES else int(dim[0])
    return math.prod([samples if f == SAMPLES else int(f) for f in dim])


def by_size(spec: TensorSpec, other: TensorSpec, samples: int, total: int) -> Dims | None:
    """The dims of a value whose specs for a part and for the whole batch are these, where those
    that grow do so as the samples; None otherwise. The samples are outermost in them.
    """
    if len(spec.shape) != len(other.shape):
        return None
    dims: list[Dim] = []
    for mine, whole in zip(spec.shape, other.shape, strict=True):
        each, rest = divmod(mine, samples)
        if mine != whole and (rest or each * total != whole):
            return None
        dims.append((mine,) if mine == whole else (SAMPLES,) if each == 1 else (SAMPLES, each))
    return tuple(dims)


def every(node: Node, state: State) -> Found:
    """The state for each output of a node, without dims of another's."""
    return tuple(state if spec is not None else None for spec in node.outputs)


def coupled(node: Node, why: str) -> Outcome:
    """The state of a node that couples samples, with the reason."""
    what = f"{node.source}: {node.op.split('.')[1]}: {why}"
    return Outcome(every(node, State(Kind.COUPLED, why=what)))


def sums(node: Node, *, scaled: bool = False, once: bool = False) -> Outcome:
    """The state of a node whose outputs are sums over the samples."""
    return Outcome(
        tuple(State(Kind.SUM, plain(o.shape)) if o is not None else None for o in node.outputs),
        scaled=scaled,
        once=once,
    )


def call_form(node: Node, states: Mapping[Ref, State], graph: Graph) -> object:
    """All that the outcome of a node depends on, but its name."""
    told = graph.specs(), states, dict[Ref, int]()
    return _form(node.args, *told), _form(node.kwargs, *told), node.outputs, node.source


def _form(
    value: object,
    specs: Mapping[Ref, TensorSpec],
    states: Mapping[Ref, State],
    numbers: dict[Ref, int],
) -> object:
    if type(value) is Ref:
        at = numbers.setdefault(value, len(numbers))
        return ("%", at, specs[value], states.get(value))
    if isinstance(value, tuple):
        return tuple([_form(v, specs, states, numbers) for v in value])
    return (type(value), value)
