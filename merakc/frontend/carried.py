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
from merakc.frontend.python_state import Change, PythonState, describe, tensors_in
from merakc.ir.graph import Graph, InputKind, OutputKind, Ref, map_refs

Descriptions = Mapping[str, Any]
# Where Python put an object, in the key of a module that runs as it is.
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


class CarriedError(RecordError):
    """A forward whose Python hands something on to the next one."""


class Leftovers:
    """What a forward has changed, and the tensors in it; made before a second forward runs."""

    def __init__(self, changes: Sequence[Change], first: GraphBuilder) -> None:
        self.changes = changes
        self.descriptions = described(changes)
        self.tensors = {id(x): x for c in changes for x in tensors_in(c.after)}
        self._names = {id(x): c.name for c in changes for x in tensors_in(c.after)}
        whole = Graph(tuple(first.inputs), tuple(first.nodes), tuple(first.outputs))
        varying = _varying(whole)
        self._varying = {key for key, x in self.tensors.items() if _varies(x, first, varying)}
        for change in changes:
            if change.shared and any(id(x) in self._varying for x in tensors_in(change.after)):
                raise CarriedError(
                    f"the forward keeps a tensor in '{change.name}', outside the model, where no "
                    "compiled step puts it; return it from the forward (model.predict gives it)"
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
        if _calls(first) != _calls(second):
            names = ", ".join(f"'{c.name}'" for c in self.changes[:5])
            raise CarriedError(
                f"the second forward is another than the first, which has changed {names}; run the "
                "model once, without gradients, before auto_parallel, or take the change out"
            )


def check_repeats(state: PythonState, again: Callable[[], object]) -> None:
    """Raises `CarriedError` where what a module has changed changes when it runs `again`."""
    changes = state.changes()
    if changes:
        descriptions = described(changes)
        again()
        _check_alike(changes, descriptions, state.changes())


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
    return repr(value) if isinstance(value, (int, float, str)) else f"a {type(value).__name__}"


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


def _calls(graph: Graph) -> list[Any]:
    """The calls whose results vary, and the outputs, with names that tell nothing of constants."""
    varying = _varying(graph)
    specs = graph.specs()
    names: dict[Ref, Any] = {Ref(i.name): (i.kind, i.target) for i in graph.inputs}

    def told(ref: Ref) -> Any:
        return names[ref] if ref in varying else ("constant", specs[ref])

    found: list[Any] = []
    for node in graph.nodes:
        own = {Ref(node.name, k): ("call", len(found), k) for k in range(len(node.outputs))}
        names |= own
        if not varying.isdisjoint(own):
            args = map_refs((node.args, node.kwargs), told)
            found.append((node.op, _ADDRESS.sub("", repr(args)), node.outputs, node.grad))
    return [*found, *((o.kind, o.name, told(o.ref)) for o in graph.outputs)]
