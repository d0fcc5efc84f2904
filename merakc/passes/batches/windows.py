"""Parts of a value taken from what it is made of, where samples are left out that are all alike.

A model may put one token before all rows, and later take that token of some rows alone:
`cat([token.expand(rows, 1, -1), x], 1)[:samples, 0]`. The first rows are other samples' than those
that they go on as, but what is taken of them is the token, expanded to fewer rows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from merakc.ir.graph import Graph, Node, Ref, TensorSpec, map_refs
from merakc.passes.sharding.dims import given
from merakc.passes.sharding.rows import POINTWISE
from merakc.passes.sharding.rules import row_of

SLICE, SELECT = "aten.slice.Tensor", "aten.select.int"
CAT, EXPAND, ALIAS = "aten.cat.default", "aten.expand.default", "aten.alias.default"
# Calls between a value and the part that is taken of it: more of them are no token before rows.
MOST_CALLS = 20
Window = tuple[tuple[int, int], ...]  # of each dim, the first place and the one behind the last
Taken = tuple[Ref, Window, tuple[int, ...]]  # of a value this window, without these dims


def with_windows(graph: Graph) -> Graph:
    """The same function, with parts of values that leave out copies alone made as fewer copies."""
    if not any(n.op == SLICE for n in graph.nodes):
        return graph
    writer = _Writer(graph)
    for node in graph.nodes:
        writer.add(node)
    return graph.with_nodes(writer.nodes).pruned()


class _TooFarError(Exception):
    """A part that is taken of the outcome of many calls."""


class _Writer:
    def __init__(self, graph: Graph) -> None:
        self.specs = dict(graph.specs())
        self.makers = {n.name: n for n in graph.nodes}
        self.nodes: list[Node] = []
        self.taken: dict[str, tuple[Taken, frozenset[int]]] = {}

    def add(self, node: Node) -> None:
        """Writes a node, or the window that it takes."""
        found = self._window(node)
        if found is None:
            self.nodes.append(node)
            return
        self.taken[node.name] = found
        (base, window, selected), sliced = found
        push = _Push(self.specs, self.makers, node)
        try:
            ref = push.of(base, window) if sliced else base
        except _TooFarError:
            ref = base
        if ref == base or sliced <= push.cut:
            self.nodes.append(node)
            return
        for dim in sorted(selected, reverse=True):
            shape = self.specs[ref].shape
            ref = push.emit(node, SELECT, (ref, dim, 0), (*shape[:dim], *shape[dim + 1 :]))
        self.nodes += [*push.nodes, replace(node, op=ALIAS, args=(ref,), kwargs=())]

    def _window(self, node: Node) -> tuple[Taken, frozenset[int]] | None:
        """What a node takes of which value, and the dims, from the last, of which it slices less
        than all.
        """
        if node.op not in (SLICE, SELECT) or (node.op == SLICE and given(node, "step") != 1):
            return None
        if any(not isinstance(arg, int | None) for arg in node.args[1:]):
            return None
        source = node.refs[0]
        shape = self.specs[source].shape
        if source.node in self.taken and self.makers[source.node].grad == node.grad:
            (base, window, selected), sliced = self.taken[source.node]
        else:
            base, window, selected = source, tuple((0, n) for n in shape), ()
            sliced = frozenset[int]()
        live = [d for d in range(len(window)) if d not in selected]
        dim = live[given(node, "dim") % len(shape)]
        first, size = window[dim][0], shape[given(node, "dim") % len(shape)]
        if node.op == SELECT:
            start = given(node, "index") % size
            stop, selected = start + 1, (*selected, dim)
        else:
            start, stop, _ = slice(given(node, "start"), given(node, "end")).indices(size)
            if (start, stop) != (0, size):
                sliced |= {dim - len(window)}
        window = (*window[:dim], (first + start, first + max(start, stop)), *window[dim + 1 :])
        return (base, window, selected), sliced


class _Push:
    """Takes a window that `node` asks for from what a value is made of; `cut` are the dims, from
    the last, in which it is of more than copies.
    """

    def __init__(self, specs: dict[Ref, TensorSpec], makers: dict[str, Node], node: Node) -> None:
        self.specs, self.makers, self.node = specs, makers, node
        self.nodes: list[Node] = []
        self.cut: set[int] = set()
        self.calls = 0

    def of(self, ref: Ref, window: Window) -> Ref:
        """The window of a value. Raises `_TooFarError` behind too many calls."""
        shape, maker = self.specs[ref].shape, self.makers.get(ref.node)
        if all(end == (0, n) for end, n in zip(window, shape, strict=True)):
            return ref
        self.calls += 1
        if self.calls > MOST_CALLS:
            raise _TooFarError
        sizes = tuple(stop - start for start, stop in window)
        if maker is not None and maker.op == CAT:
            return self._piece(ref, maker, window)
        if maker is not None and maker.op == EXPAND:
            return self.emit(maker, EXPAND, (self._under(maker.refs[0], window), sizes), sizes)
        pointwise = maker is not None and maker.op.startswith("aten.") and len(maker.outputs) == 1
        if maker is not None and pointwise and row_of(maker.op) == POINTWISE:
            args = map_refs(maker.args, lambda r: self._under(r, window))
            kwargs = map_refs(maker.kwargs, lambda r: self._under(r, window))
            return self.emit(maker, maker.op, args, sizes, kwargs, self.specs[ref].dtype)
        return self._cut(ref, window)

    def _piece(self, ref: Ref, maker: Node, window: Window) -> Ref:
        """A window of what is joined, if it lies in one piece, whose gradient passes the join."""
        dim, before = given(maker, "dim") % len(window), 0
        start, stop = window[dim]
        for piece in maker.args[0]:
            after = before + self.specs[piece].shape[dim]
            same = maker.grad and self.specs[piece].dtype == self.specs[ref].dtype
            if same and before <= start and stop <= after:
                own = (start - before, stop - before)
                return self.of(piece, (*window[:dim], own, *window[dim + 1 :]))
            before = after
        return self._cut(ref, window)

    def _under(self, ref: Ref, window: Window) -> Ref:
        """The part of an argument that a window of the result reads."""
        shape = self.specs[ref].shape
        own = window[len(window) - len(shape) :]
        return self.of(
            ref, tuple((0, 1) if n == 1 else end for end, n in zip(own, shape, strict=True))
        )

    def _cut(self, ref: Ref, window: Window) -> Ref:
        """The window, taken of the value itself."""
        for dim, (start, stop) in enumerate(window):
            shape = self.specs[ref].shape
            if (start, stop) != (0, shape[dim]):
                self.cut.add(dim - len(shape))
                sizes = (*shape[:dim], stop - start, *shape[dim + 1 :])
                ref = self.emit(self.node, SLICE, (ref, dim, start, stop), sizes)
        return ref

    def emit(
        self,
        like: Node,
        op: str,
        args: Any,
        shape: tuple[int, ...],
        kwargs: Any = (),
        dtype: torch.dtype | None = None,
    ) -> Ref:
        """Writes a call in another's place; where not given, its dtype is its first argument's."""
        name = f"{self.node.name}.window{len(self.nodes)}"
        spec = TensorSpec(shape, dtype or self.specs[args[0]].dtype)
        self.nodes.append(
            replace(like, name=name, op=op, args=args, kwargs=kwargs, outputs=(spec,))
        )
        self.specs[Ref(name)] = spec
        return Ref(name)
