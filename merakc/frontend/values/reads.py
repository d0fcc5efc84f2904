"""What a forward reads of its batch in Python: values that no parameter and no draw stands before.

`lengths.tolist()`, `max(1, mask.sum())`, `len(mask.nonzero())`: such a value is worked out on the
batch itself while the forward is recorded. The graph is right for every batch that gives the same
answers, which can be asked before a step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from merakc.errors import RecordError
from merakc.frontend.values.symbols import ITEM, Answer, Number, numbers
from merakc.ir.graph import Graph, Input, InputKind, Node, Output, OutputKind, Ref
from merakc.kernels.ops import resolve_op

Sources = Mapping[str, tuple[Ref, int | None]]
"""Where a symbol's value is from: the number that a value is, or its size along a dim."""


class Origin(IntEnum):
    """What a value follows from; of several, the last counts."""

    NOTHING = 0  # but constants
    BATCH = 1
    OTHER = 2


_ORIGINS = {InputKind.BATCH: Origin.BATCH, InputKind.CONSTANT: Origin.NOTHING}


class ValuesNeededError(RecordError):
    """A forward that reads its batch, recorded with a batch of which only the shapes are known."""


class Symbolic(Mapping[str, Answer]):
    """The values of symbols, by those of a graph."""

    def __init__(self, sources: Sources, value: Callable[[Ref], Any]) -> None:
        self._sources, self._value = sources, value

    def __getitem__(self, name: str) -> Answer:
        ref, dim = self._sources[name]
        found = self._value(ref)
        if dim is not None:
            return int(found.shape[dim])
        return found.item() if isinstance(found, Tensor) else found

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)


def run_node(
    node: Node,
    value: Callable[[Ref], Any],
    symbols: Mapping[str, Answer],
    functions: Mapping[str, Callable[..., Any]],
) -> tuple[Any, ...]:
    """The outputs of a node, which may read numbers."""

    def now(arg: Any) -> Any:
        if isinstance(arg, Number):
            return arg.value(symbols)
        if isinstance(arg, Ref):
            return value(arg)
        return tuple(map(now, arg)) if isinstance(arg, tuple) else arg

    args, kwargs = now(node.args), {k: now(v) for k, v in node.kwargs}
    if node.op == ITEM:
        return (args[0].item(),)
    with torch.set_grad_enabled(node.grad and torch.is_grad_enabled()):
        out = (functions.get(node.op) or resolve_op(node.op))(*args, **kwargs)
    return tuple(out) if isinstance(out, (tuple, list)) else (out,)


def read_refs(node: Node, sources: Sources) -> list[Ref]:
    """The values that a node reads, those behind its numbers among them."""
    asked = [s for n in numbers((node.args, node.kwargs)) for s in n.symbols]
    return [*node.refs, *(sources[s][0] for s in asked)]


@dataclass(frozen=True, slots=True)
class Read:
    """A number that Python was told, and the line that asked."""

    number: Number
    answer: Answer
    source: str


@dataclass(frozen=True)
class Reads:
    """All that a recorded forward has read of its batch.

    `graph` computes what the symbols of the numbers are taken from, of the batch's tensors.
    """

    graph: Graph
    sources: Sources
    asked: tuple[Read, ...]

    @property
    def answers(self) -> tuple[Answer, ...]:
        """What the recording was told."""
        return tuple(read.answer for read in self.asked)

    def of(self, batch: Mapping[str, Tensor]) -> tuple[Answer, ...]:
        """The answers of a batch, whose tensors are given by the names that a recording uses.

        Answers stand for themselves from the first on that the recording was not given: what would
        be asked behind it is not known.
        """
        inputs = [i for i in self.graph.inputs if i.kind is InputKind.BATCH]
        given = {Ref(i.name): batch[i.target] for i in inputs if i.target in batch}
        reader = Reader(self.graph.inputs, self.graph.nodes, self.graph.constants, self.sources)
        reader.given = {ref: tensor.detach() for ref, tensor in given.items()}
        found: list[Answer] = []
        with really():
            for read in self.asked:
                found.append(read.number.value(reader.symbols))
                if found[-1] != read.answer:
                    break
        return tuple(found)

    def difference(self, batch: Mapping[str, Tensor]) -> str:
        """The first line that this batch answers otherwise, with both answers; or nothing."""
        found = self.of(batch)
        for read, other in zip(self.asked, found, strict=False):
            if other != read.answer:
                return f"{read.source}: {read.answer} in one, {other} in the other"
        return ""


@contextlib.contextmanager
def really() -> Iterator[None]:
    """Runs calls on real tensors, wherever a recording is: also where a call on fake ones has made
    meta tensors of them.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch._C._PreserveDispatchKeyGuard())
        torch._C._set_meta_in_tls_dispatch_include(False)
        stack.enter_context(_disable_current_modes())
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch._C._DisableAutocast())
        yield


@dataclass(eq=False)
class Reader:
    """Works values of the batch alone out, while a graph grows or after; `given` are its tensors.

    `asked` is what Python was told so far.
    """

    inputs: Sequence[Input]
    nodes: Sequence[Node]
    constants: Mapping[str, Tensor]
    sources: Sources
    functions: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    given: dict[Ref, Tensor] = field(default_factory=dict)
    asked: list[Read] = field(default_factory=list)
    values: dict[Ref, Any] = field(default_factory=dict)
    origins: dict[str, Origin] = field(default_factory=dict)
    made: dict[str, Node] = field(default_factory=dict)

    @cached_property
    def symbols(self) -> Symbolic:
        """The values of the symbols."""
        return Symbolic(self.sources, self.value)

    def maker_of(self, name: str) -> Node | None:
        """The node of a name, if it is none of an input."""
        for node in self.nodes[len(self.made) :]:
            self.made[node.name] = node
        return self.made.get(name)

    def is_known(self, ref: Ref) -> bool:
        """Whether nothing but the batch stands before a value."""
        return self.origin(ref) is not Origin.OTHER

    def origin(self, ref: Ref) -> Origin:
        """What a value follows from."""
        waiting, entered = [ref.node], set[str]()
        while waiting:
            name = waiting[-1]
            node = self.maker_of(name)
            if name in self.origins:
                waiting.pop()
            elif node is None:
                kinds = [i.kind for i in self.inputs if i.name == name]
                self.origins[name] = _ORIGINS.get(kinds[0], Origin.OTHER)
            else:
                before = [r.node for r in read_refs(node, self.sources)]
                unseen = [b for b in before if b not in self.origins]
                assert not (unseen and name in entered), f"{node} reads what it makes"
                entered.add(name)
                waiting += unseen
                if not unseen:
                    known = node.op.startswith(("aten.", "ragged."))  # others draw, or communicate
                    every = [self.origins[b] for b in before]
                    self.origins[name] = (
                        max(every, default=Origin.NOTHING) if known else Origin.OTHER
                    )
        return self.origins[ref.node]

    def maker(self, ref: Ref, passing: Set[str]) -> str:
        """The call that made a value, looking through those that are `passing` it on."""
        node = self.maker_of(ref.node)
        while node is not None and node.op in passing:
            node = self.maker_of(node.refs[0].node)
        return node.op if node is not None else ""

    def knows(self, number: Number) -> bool:
        """Whether nothing but the batch stands before a number."""
        return all(s in self.sources and self.is_known(self.sources[s][0]) for s in number.symbols)

    def number(self, number: Number) -> Answer:
        """A number that the batch knows."""
        with really():
            return number.value(self.symbols)

    def value(self, ref: Ref) -> Any:
        """A value that the batch knows. Raises `ValuesNeededError` where there are only shapes."""
        waiting = [ref]
        while waiting:
            node = self.maker_of(waiting[-1].node)
            if waiting[-1] in self.values:
                waiting.pop()
            elif node is None:
                self.values[waiting[-1]] = self._input(waiting[-1])
            elif unseen := [r for r in read_refs(node, self.sources) if r not in self.values]:
                waiting += unseen
            else:
                outs = run_node(node, self.values.__getitem__, self.symbols, self.functions)
                self.values |= {Ref(node.name, k): out for k, out in enumerate(outs)}
        return self.values[ref]

    def _input(self, ref: Ref) -> Tensor:
        found = self.given.get(ref, self.constants.get(ref.node))
        if found is None:
            raise ValuesNeededError(
                f"the forward reads values of '{ref.node}' of the batch, of which only the shape "
                "is known; give merakc a batch with values"
            )
        return found.cpu()

    def log(self, number: Number, answer: Answer, source: str) -> Answer:
        """Notes what Python was told, if other batches may say something else."""
        refs = [self.sources[s][0] for s in number.symbols]
        if any(self.origin(ref) is Origin.BATCH for ref in refs):
            self.asked.append(Read(number, answer, source))
        return answer

    def reads(self) -> Reads | None:
        """What was read, with the graph that reads it again; None where that is nothing."""
        if not self.asked:
            return None
        wanted = {self.sources[s][0] for read in self.asked for s in read.number.symbols}
        names, behind = [], {r.node for r in wanted}
        for node in reversed(self.nodes):
            if node.name in behind:
                names.append(node)
                behind |= {r.node for r in read_refs(node, self.sources)}
        kept = tuple(i for i in self.inputs if i.name in behind)
        outputs = tuple(Output(str(r), OutputKind.RESULT, r) for r in sorted(wanted))
        constants = {n: c for n, c in self.constants.items() if n in behind}
        graph = Graph(kept, tuple(reversed(names)), outputs, constants)
        used = {s for n in names for x in numbers((n.args, n.kwargs)) for s in x.symbols}
        used |= {s for read in self.asked for s in read.number.symbols}
        return Reads(graph, {s: self.sources[s] for s in sorted(used)}, tuple(self.asked))
