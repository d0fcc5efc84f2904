"""Recordings of one forward that hold for batches of many sizes.

A batch of another length is the same forward with other numbers in it. Once a forward has been
recorded for some sizes, it is recorded with symbols for those that differ, and torch notes every
condition that it, or Python, has asked of them. Where a batch fulfils these, its recording is that
one with its own numbers in it; where it does not, the forward is recorded anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch import nn

from merakc.batches.split import named_tensors
from merakc.errors import MerakError
from merakc.frontend.asking import SymbolsNeededError
from merakc.frontend.calls.generators import DrawnError
from merakc.frontend.record import SIZES, Recording, computes_alone, record_any_size
from merakc.frontend.values.symbols import Answer, Number, numbers
from merakc.ir.graph import Graph, Node, TensorSpec

Sizes = dict[str, tuple[int, ...]]
# Recordings with numbers that are kept of one form of batch to compare with; recordings with
# symbols that it may have, as a forward may do otherwise for short batches, or one sample; forms.
MOST_SEEN, MOST_MADE, MOST_FORMS = 4, 4, 8


class Batch(NamedTuple):
    """What a forward is recorded of: a model, its arguments, and the dtype of its parameters."""

    model: nn.Module
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    dtype: torch.dtype | None

    @property
    def sizes(self) -> Sizes:
        """The shapes of its tensors."""
        return {name: tuple(x.shape) for name, x in named_tensors(self.args, self.kwargs).items()}

    @property
    def form(self) -> tuple[Any, ...]:
        """All of the batch but its sizes and values."""
        leaves, spec = pytree.tree_flatten((tuple(self.args), dict(self.kwargs)))
        kinds = [(x.dim(), x.dtype) if isinstance(x, torch.Tensor) else repr(x) for x in leaves]
        return str(spec), tuple(kinds), self.dtype


@dataclass(frozen=True)
class AnySize:
    """A recording with symbols: the dims of the batch, and the conditions for which it holds."""

    recording: Recording
    dims: Mapping[str, Sequence[int | str]]
    conditions: Sequence[Number]
    names: Mapping[str, str]  # of the symbols in its numbers, by those of the dims
    changing: frozenset[str]  # the nodes with symbols in them

    def at(self, sizes: Sizes) -> Recording | None:
        """The recording for these sizes; None where it does not hold for them."""
        values = self._values(sizes)
        if values is None or not all(c.value(values) for c in self.conditions):
            return None
        made = self.recording
        now = _Now(values)
        nodes = tuple(
            replace(n, args=now.of(n.args), kwargs=now.of(n.kwargs), outputs=now.specs(n.outputs))
            if n.name in self.changing else n
            for n in made.graph.nodes
        )  # fmt: skip
        inputs = tuple(replace(i, spec=now.spec(i.spec)) for i in made.graph.inputs)
        graph = replace(made.graph, inputs=inputs, nodes=nodes)
        return replace(made, graph=graph)

    def _values(self, sizes: Sizes) -> dict[str, Answer] | None:
        """The numbers of the symbols, if the sizes are ones that they may have."""
        found: dict[str, Answer] = {}
        for name, dims in self.dims.items():
            for dim, size in zip(dims, sizes[name], strict=True):
                known = dim if isinstance(dim, int) else found.setdefault(self.names[dim], size)
                if known != size or (isinstance(dim, str) and not SIZES[0] <= size <= SIZES[1]):
                    return None
        return found


class _Now:
    """The numbers of a recording with symbols, where these are known."""

    def __init__(self, values: Mapping[str, Answer]) -> None:
        self._values, self._known = values, {}  # type: Mapping[str, Answer], dict[Any, Answer]

    def of(self, value: Any) -> Any:
        """A nest of tuples with numbers of Python's."""
        if isinstance(value, Number):
            if value.expression not in self._known:
                self._known[value.expression] = value.value(self._values)
            return self._known[value.expression]
        return tuple(map(self.of, value)) if type(value) is tuple else value

    def spec(self, spec: TensorSpec) -> TensorSpec:
        """A spec with sizes of Python's."""
        return TensorSpec(self.of(spec.shape), spec.dtype)

    def specs(self, specs: Sequence[TensorSpec | None]) -> tuple[TensorSpec | None, ...]:
        """Those of a node's outputs."""
        return tuple(None if s is None else self.spec(s) for s in specs)


@dataclass
class Form:
    """What was recorded of batches that differ in sizes alone."""

    seen: list[tuple[int, Sizes, Recording]] = field(default_factory=list)
    made: list[AnySize] = field(default_factory=list)
    tried: int = 0


class AnySizes:
    """The recordings of one model's forward, by the form of the batch and what else they are for.

    `context` is what a forward can see beside its batch: modes, attributes, autocast.
    """

    def __init__(self) -> None:
        self.anew = 0  # recordings that it does not have from others
        self._context: Any = None
        self._batches = 0
        self._forms: dict[Any, Form] = {}

    def begin(self, context: Any) -> None:
        """The recordings that follow are of one batch and its parts."""
        self._context, self._batches = context, self._batches + 1

    def find(self, batch: Batch) -> Recording | None:
        """The recording of a batch, from one for many sizes; None where it is to be recorded."""
        form, sizes = self._form(batch), batch.sizes
        for made in reversed(form.made):
            if (found := made.at(sizes)) is not None:
                return found
        seen = [(own, recorded) for _, own, recorded in form.seen if _compare(own, sizes)]
        others = [own for when, own, _ in form.seen if when < self._batches]
        if form.tried == MOST_MADE or not (seen and others) or sizes in others:
            return None
        form.tried += 1
        for_many = any_size(seen, batch)
        if for_many is None:
            return None
        form.made.append(for_many)
        return for_many.at(sizes)

    def keep(self, made: Recording, batch: Batch) -> None:
        """Keeps the recording of a batch, to compare those for many sizes with."""
        form = self._form(batch)
        self.anew += 1
        form.seen.append((self._batches, batch.sizes, made))
        del form.seen[:-MOST_SEEN]
        if not computes_alone(made):
            form.tried = MOST_MADE

    def _form(self, batch: Batch) -> Form:
        key = (batch.form, torch.is_grad_enabled(), self._context)
        self._forms[key] = found = self._forms.pop(key, None) or Form()
        if len(self._forms) > MOST_FORMS:
            del self._forms[next(iter(self._forms))]
        return found


def any_size(seen: Sequence[tuple[Sizes, Recording]], batch: Batch) -> AnySize | None:
    """A recording with symbols for the sizes that this batch has otherwise than those seen, which
    gives all of these as they were recorded, where it holds for them; or None.
    """
    dims = _dims([*(sizes for sizes, _ in seen), batch.sizes])
    try:
        recording, conditions, names = record_any_size(*batch, dims)
    except (MerakError, DrawnError, SymbolsNeededError):
        return None
    changing = frozenset(n.name for n in recording.graph.nodes if _changes(n))
    made = AnySize(recording, dims, tuple(map(Number, conditions)), names, changing)
    compared = [(made.at(sizes), recorded) for sizes, recorded in seen]
    same = [found is None or _same(found, recorded) for found, recorded in compared]
    return made if all(same) and any(found for found, _ in compared) else None


def _changes(node: Node) -> bool:
    shapes = tuple(s.shape for s in node.outputs if s is not None)
    return any(True for _ in numbers((node.args, node.kwargs, shapes)))


def _compare(one: Sizes, other: Sizes) -> bool:
    """Whether sizes that symbols do not stand for are the same in two batches."""
    pairs = zip(one.values(), other.values(), strict=True)
    return all(a == b or min(a, b) >= SIZES[0] for own in pairs for a, b in zip(*own, strict=True))


def _dims(seen: Sequence[Sizes]) -> dict[str, list[int | str]]:
    """The sizes of each tensor of a batch: a number where it was always the same, or a name, the
    same for those that were always alike.
    """
    found: dict[str, list[int | str]] = {}
    named: dict[tuple[int, ...], str] = {}
    for name, shape in seen[-1].items():
        every = zip(*(sizes[name] for sizes in seen), strict=True)
        found[name] = [
            size
            if size < SIZES[0] or set(own) == {size}
            else named.setdefault(own, f"size{len(named)}")
            for size, own in zip(shape, every, strict=True)
        ]
    return found


def _same(one: Recording, other: Recording) -> bool:
    """Whether two recordings are the same, numbers of one kind and all."""
    return (
        one.graph == other.graph
        and str(one.graph) == str(other.graph)
        and _same_constants(one.graph, other.graph)
        and repr((one.outputs, one.structure)) == repr((other.outputs, other.structure))
        and one.aliases == other.aliases
    )


def _same_constants(one: Graph, other: Graph) -> bool:
    return one.constants.keys() == other.constants.keys() and all(
        x.dtype == other.constants[name].dtype and torch.equal(x, other.constants[name])
        for name, x in one.constants.items()
    )
