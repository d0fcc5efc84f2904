"""Compiles a graph to one Python function: straight-line calls, each value freed after its last
reader. No interpreter and no autograd engine is in the loop at run time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType
from typing import Any

import torch

from merakc.analysis.accumulation import ADDING
from merakc.analysis.aliases import last_uses
from merakc.analysis.overwrites import overwrites, overwriting_call
from merakc.ir.graph import Graph, Node, Ref
from merakc.kernels.ops import (
    FUSED,
    compiled_call,
    makes_tensor,
    returns_list,
    uses_autograd,
)

Compiled = Callable[[list[Any]], list[Any]]
Tell = Callable[[Ref, Any], None]
LITERALS = (bool, int, str, type(None))
MOST_CODE = 64  # graphs whose code is kept


@dataclass(frozen=True, slots=True)
class Hooks:
    """What a compiled graph asks for while it runs, and what it hands out before its end.

    An input in `fetched` (input name -> argument of `fetch`) is fetched right before its first
    reader; an output in `sunk` (output name -> argument of `sink`) is handed to `sink` as soon as
    it is made. Neither is among what the function is given or returns. Those in `added`, a part of
    `accumulated` ones, are handed to it as totals: `place` says, of the same argument, to what they
    are added, or None, and whether anything is there yet.
    """

    fetch: Callable[[str], torch.Tensor]
    sink: Callable[[str, torch.Tensor], None]
    fetched: Mapping[str, str]
    sunk: Mapping[str, str]
    place: Callable[[str], tuple[torch.Tensor | None, bool]]
    added: Collection[str]


def _none(*_: object) -> Any:
    raise AssertionError("a graph without hooks calls none")


NO_HOOKS = Hooks(_none, _none, {}, {}, _none, ())


def compile_graph(
    graph: Graph, device: torch.device, hooks: Hooks = NO_HOOKS, tell: Tell | None = None
) -> Compiled:
    """A function from the values of `graph.inputs`, in order, to those of `graph.outputs`.

    The list that it is given is emptied, so that the caller holds nothing alive through it. Where
    no call needs autograd, its layers of the dispatcher are left out. Every value is handed to
    `tell` as soon as it is there.
    """
    writer = _Writer(graph, device, hooks, tell)
    source = writer.source()
    scope = writer.scope
    scope["numbers"] = tuple(writer.numbers)
    exec(_code(source), scope)
    run: Compiled = scope["run"]
    if any(uses_autograd(node.op) for node in graph.nodes):
        return run

    def below(given: list[Any]) -> list[Any]:
        with torch._C._AutoDispatchBelowADInplaceOrView():
            return run(given)

    return below


@lru_cache(maxsize=MOST_CODE)
def _code(source: str) -> CodeType:
    return compile(source, "<merakc graph>", "exec")


class _Writer:
    """Writes the source of one graph; `scope` holds what the source names. The `numbers` in it are
    apart: graphs for batches of other sizes have the same code.
    """

    def __init__(self, graph: Graph, device: torch.device, hooks: Hooks, tell: Tell | None) -> None:
        self.graph, self.device, self.tell = graph, device, tell
        self.scope: dict[str, Any] = {
            "fetch": hooks.fetch, "sink": hooks.sink, "place": hooks.place,
        }  # fmt: skip
        self.scope |= {"tell": tell, "Ref": Ref} if tell is not None else {}
        self.numbers: list[Any] = []  # and tuples of them, dtypes and the like
        self.known: dict[str, Any] = {}  # of these, the tuples, by how they are written
        self.names: dict[Ref, str] = {}
        self.calls: dict[str, Callable[..., Any]] = {}  # by op
        self.functions: dict[object, str] = {}  # what the source calls a function
        self.over = overwrites(graph)
        self.tuples = {n.name for n in graph.nodes if returns_tuple(n)}
        self.unfetched = {Ref(name): target for name, target in hooks.fetched.items()}
        self.given = [Ref(i.name) for i in graph.inputs if i.name not in hooks.fetched]
        self.returned = [o for o in graph.outputs if o.name not in hooks.sunk]
        self.sunk: dict[Ref, list[str]] = {}
        for out in graph.outputs:
            if out.name in hooks.sunk:
                self.sunk.setdefault(out.ref, []).append(hooks.sunk[out.name])
        self.added = {o.ref: hooks.sunk[o.name] for o in graph.outputs if o.name in hooks.added}

    def source(self) -> str:
        """The function's source."""
        dying = self._last_readers()
        lines = ["def run(given, numbers=numbers):"]
        if self.given:
            inputs = ", ".join(map(self._value, self.given))
            lines += [f"    {inputs}, = given", "    given.clear()"]
        lines += self._told(self.given)
        lines += self._sinks(self.given)
        read = {r for n in self.graph.nodes for r in n.refs} | {o.ref for o in self.graph.outputs}
        for k, node in enumerate(self.graph.nodes):
            if self.unfetched:
                lines += self._fetches(node.refs)
            own = list(node.outs)
            if node.op.startswith(FUSED):  # lets go of what dies here on its way
                lines.append(f"    box = [{', '.join(map(self._arg, node.args))}]")
                dead = [ref for ref in dying.get(k, ()) if ref in node.refs]
                dying[k] = [ref for ref in dying.get(k, ()) if ref not in dead]
                lines += [f"    del {', '.join(map(self._value, dead))}"] if dead else []
            if node.name in self.tuples:
                # Each for itself: a tuple would keep all of them as long as any is wanted.
                own = [ref for ref in own if ref in read]
                lines.append(f"    made = {self._call(node)}")
                lines += [f"    {self._value(ref)} = made[{ref.index}]" for ref in own]
                lines.append("    del made")
            else:
                lines.append(f"    {self._value(Ref(node.name))} = {self._call(node)}")
            lines += self._told(own)
            if self.sunk:
                lines += self._sinks(own)
            if dying.get(k):
                lines.append(f"    del {', '.join(map(self._value, dying[k]))}")
        lines += self._fetches(o.ref for o in self.returned)
        outs = ", ".join(self._value(o.ref) for o in self.returned)
        return "\n".join([*lines, f"    return [{outs}]"])

    def _fetches(self, refs: Iterable[Ref]) -> Iterator[str]:
        for ref in refs:
            if ref in self.unfetched:
                yield f"    {self._value(ref)} = fetch({self.unfetched.pop(ref)!r})"
                yield from self._told([ref])

    def _told(self, refs: Iterable[Ref]) -> Iterator[str]:
        for ref in refs if self.tell is not None else ():
            yield f"    tell({ref!r}, {self._value(ref)})"

    def _sinks(self, refs: Iterable[Ref]) -> Iterator[str]:
        for ref in refs:
            for name in self.sunk.get(ref, ()):
                yield f"    sink({name!r}, {self._value(ref)})"

    def _last_readers(self) -> dict[int, list[Ref]]:
        named = {*self.given, *self.sunk, *(r for n in self.graph.nodes for r in n.refs)}
        named |= {Ref(n.name) for n in self.graph.nodes if n.name not in self.tuples}
        last = dict.fromkeys(self.given, 0) if self.graph.nodes else {}
        last |= last_uses(self.graph, {ref: ref for ref in named})
        for out in self.returned:
            last.pop(out.ref, None)
        dying: dict[int, list[Ref]] = {}
        for ref, k in last.items():
            dying.setdefault(k, []).append(ref)
        return dying

    def _value(self, ref: Ref) -> str:
        name = self.names.get(ref)
        if name is None:
            name = self.names[ref] = f"v{len(self.names)}"
        return name

    def _call(self, node: Node) -> str:
        args, total = node.args, self.added.get(Ref(node.name))
        if total is not None:
            call = ADDING[node.op]
        elif node.name in self.over:
            call, args = overwriting_call(node, self.over[node.name])
        else:
            if node.op not in self.calls:
                self.calls[node.op] = self.graph.functions.get(node.op) or compiled_call(node.op)
            call = self.calls[node.op]
        function = self.functions.setdefault(call, f"f{len(self.functions)}")
        self.scope[function] = call
        if node.op.startswith(FUSED):
            return f"{function}(box)"
        parts = [self._arg(a) for a in args]
        parts += [f"{k}={self._arg(v)}" for k, v in node.kwargs]
        if total is not None:
            parts.insert(0, f"*place({total!r})")
        if makes_tensor(node.op):
            parts.append(f"device={self._arg(self.device)}")
        return f"{function}({', '.join(parts)})"

    def _arg(self, value: Any) -> str:
        if isinstance(value, Ref):
            return self._value(value)
        if isinstance(value, tuple) and not all(isinstance(v, LITERALS) for v in value):
            return "[" + ", ".join(self._arg(v) for v in value) + "]"
        if isinstance(value, LITERALS) and type(value) is not int:
            return repr(value)
        if isinstance(value, tuple):
            # It is made once, and a list at every call; that of a layer is the others', too.
            value = self.known.setdefault(repr(value), value)
        self.numbers.append(value)  # also what has no literal: dtypes, floats such as inf
        return f"numbers[{len(self.numbers) - 1}]"


def returns_tuple(node: Node) -> bool:
    """Whether the node's op returns several values or a list of them."""
    return len(node.outputs) > 1 or node.op.startswith(FUSED) or returns_list(node.op)
