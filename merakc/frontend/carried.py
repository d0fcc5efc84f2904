"""Whether what a forward leaves behind in Python has a part in the next one.

A recording is one forward, and stands for all that follow. So where a forward has changed
something, a second one is recorded on what it left. Both have to be the same: then what changed is
a cache, or is only written. Counters, memories and branches taken once are refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from merakc.errors import RecordError
from merakc.frontend.builder import GraphBuilder
from merakc.frontend.python.content import content_hash, describe, tensors_in
from merakc.frontend.python.state import Change, PythonState
from merakc.ir.graph import Graph, InputKind, OutputKind, Ref, map_refs

WORTH_TELLING = 60  # characters of a value
Descriptions = Mapping[str, Any]
# Where Python put an object, in the key of a module that runs as it is.
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


class CarriedError(RecordError):
    """A forward whose Python hands something on to the next one."""


class Leftovers:
    """The changes that a forward made, with their tensors; taken before a second forward runs."""

    def __init__(self, changes: Sequence[Change], first: GraphBuilder) -> None:
        self.changes = changes
        self.descriptions = described(changes)
        self.tensors = {id(x): x for c in changes for x in tensors_in(c.after)}
        self._names = {id(x): c.name for c in changes for x in tensors_in(c.after)}
        whole = Graph(tuple(first.inputs), tuple(first.nodes), tuple(first.outputs))
        varying = _varying(whole)
        self._first, self._refs = first, varying
        self._varying = {key for key, x in self.tensors.items() if _varies(x, first, varying)}
        _check_parts(changes)
        for change in changes:
            if change.shared and any(id(x) in self._varying for x in tensors_in(change.after)):
                raise CarriedError(
                    f"the forward keeps a tensor in '{change.name}', outside the model, where no "
                    "compiled step puts it; return it from the forward (model.predict gives it)"
                )

    def is_constant(self, tensor: Tensor) -> bool:
        """Whether a tensor that the first forward has made is the same in every forward."""
        return self._first.aliases.find(tensor) is not None and not _varies(
            tensor, self._first, self._refs
        )

    def check(self, first: Graph, second: Graph, later: Sequence[Change], read: set[int]) -> None:
        """Raises `CarriedError` where a second forward is another than the first.

        `later` is what both have changed, `read` the ids of the tensors that the second has read.
        """
        kept = {id(x) for c in later for x in tensors_in(c.after)}
        for key in read & (self._varying | (self.tensors.keys() - kept)):
            raise CarriedError(
                f"the forward reads in '{self._names[key]}' a tensor that the forward before it "
                "left there, which a recorded graph cannot hand on; register it as a buffer whose "
                "shape does not depend on the batch, or take it from the batch"
            )
        _check_alike(self.changes, self.descriptions, later)
        line = _difference(first, second, strict=not read)
        if line and self.changes:
            names = ", ".join(f"'{c.name}'" for c in self.changes[:5])
            raise CarriedError(
                f"the second forward is another than the first, which has changed {names}; run the "
                "model once, without gradients, before auto_parallel, or take the change out"
            )
        if line:
            raise CarriedError(
                f"{line}: of two forwards on the same batch, the second computes something else "
                "here than the first, with numbers from outside the model (a counter, an iterator, "
                "a clock, a file, a draw); give them in the batch, or make them a buffer"
            )

    def check_left(self, later: Sequence[Change]) -> None:
        """Raises `CarriedError` where a forward has left something else behind."""
        _check_alike(self.changes, self.descriptions, later)


def _check_parts(changes: Sequence[Change]) -> None:
    """Raises `CarriedError` where a forward makes or takes away what the model has been given with:
    all but buffers that are no part of its state.
    """
    names = {c.name for c in changes}
    for change in changes:
        path, _, key = change.name.rpartition(".")
        unsaved = f"{path}._non_persistent_buffers_set[{key!r}]".lstrip(".")
        if change.part and not (change.part == "buffer" and unsaved in names):
            raise CarriedError(
                f"the forward makes, replaces or takes away the {change.part} '{change.name}', of "
                "which no plan and no optimizer would know; do it in __init__, or run the model "
                "once on a batch, without gradients, before auto_parallel"
            )


def check_repeats(state: PythonState, again: Callable[[], object]) -> None:
    """Raises `CarriedError` where what a module has changed changes when it runs `again`."""
    changes = state.changes()
    if changes:
        descriptions = described(changes)
        again()
        _check_alike(changes, descriptions, state.changes())


def check_remembered(state: PythonState) -> list[Change]:
    """The changes. Raises `CarriedError` where a function with a cache (`functools.lru_cache`)
    would give other tensors than those that it gave in an earlier forward, and still has in one
    process.
    """
    for function, name in state.remembered.changed():
        code = function.__wrapped__.__code__
        raise CarriedError(
            f"{code.co_filename}:{code.co_firstlineno}: '{function.__name__}' remembers tensors, "
            f"and '{name}', which it reads, has changed since an earlier forward; in one process "
            "they would be those of before, and a recording has to compute them anew: make them in "
            "__init__, as a buffer, or without a cache"
        )
    return state.changes()


def _check_alike(
    changes: Sequence[Change], descriptions: Descriptions, later: Sequence[Change]
) -> None:
    after = described(later)
    for name in {**descriptions, **after}:
        if descriptions.get(name) != after.get(name):
            raise CarriedError(
                f"every forward changes '{name}' (from {_told(changes, name)} to "
                f"{_told(later, name)} in two of them), which a recorded graph cannot; keep it "
                "outside of forward, or make it a buffer"
            )


def described(changes: Sequence[Change]) -> Descriptions:
    """What has changed, by name, without the identity of objects."""
    return {c.name: describe(c.after) for c in changes}


def _told(changes: Sequence[Change], name: str) -> str:
    value = next((c.after for c in changes if c.name == name), None)
    known = isinstance(value, (int, float, str)) and len(repr(value)) < WORTH_TELLING
    return repr(value) if known else f"a {type(value).__name__}"


def _varying(graph: Graph) -> set[Ref]:
    """The values that may be others in another forward: not what buffers and literals give."""
    written = {o.name for o in graph.outputs if o.kind is OutputKind.BUFFER}
    found = {
        Ref(i.name)
        for i in graph.inputs
        if i.kind is not InputKind.CONSTANT
        and (i.kind is not InputKind.BUFFER or i.target in written)
    }
    for node in graph.nodes:
        if not found.isdisjoint(node.refs):
            found.update(Ref(node.name, k) for k in range(len(node.outputs)))
    return found


def _varies(tensor: Tensor, builder: GraphBuilder, varying: set[Ref]) -> bool:
    alias = builder.aliases.find(tensor)
    if alias is None:
        return isinstance(tensor, FakeTensor)
    return alias.ref in varying


def _difference(first: Graph, second: Graph, *, strict: bool) -> str:
    """The line of the first call in which two graphs differ, or other words; empty if they do not.

    Where it is not `strict`, only calls whose results vary count.
    """
    before, now = _calls(first, strict=strict), _calls(second, strict=strict)
    for (old, _), (new, source) in zip(before, now, strict=False):
        if old != new:
            return source or "what the forward returns"
    longer = max(before, now, key=len)[min(len(before), len(now)) :]
    return next((source or "what the forward returns" for _, source in longer), "")


def _calls(graph: Graph, *, strict: bool) -> list[tuple[Any, str]]:
    """The calls and the outputs, each with its line, with names that tell nothing of constants;
    where it is `strict`, those that give constants too, and the constants by their values.
    """
    varying = _varying(graph)
    specs = graph.specs()
    names: dict[Ref, Any] = {Ref(i.name): (i.kind, i.target) for i in graph.inputs}
    if strict:
        names |= {Ref(n): ("constant", content_hash(c)) for n, c in graph.constants.items()}

    def told(ref: Ref) -> Any:
        return names[ref] if strict or ref in varying else ("constant", specs[ref])

    found: list[tuple[Any, str]] = []
    for node in graph.nodes:
        own = {Ref(node.name, k): ("call", len(found), k) for k in range(len(node.outputs))}
        names |= own
        if strict or not varying.isdisjoint(own):
            args = map_refs((node.args, node.kwargs), told)
            call = node.op, _ADDRESS.sub("", repr(args)), node.outputs, node.grad
            found.append((call, node.source))
    return [*found, *(((o.kind, o.name, told(o.ref)), "") for o in graph.outputs)]
