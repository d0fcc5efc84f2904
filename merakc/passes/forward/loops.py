"""Loops over pieces of a tensor, written as calls on all pieces together.

A forward may split a tensor, compute the same of each piece, and join the results: attention within
each image of a batch, say. Recorded, that is as many calls as there are pieces. Pieces of one size
become a dim of their own, in which every call computes each by itself; where the calls go through
rows one by one, pieces may be of any size, and the calls are made on the whole. There are then as
many calls for a part of a batch as for all of it, and larger ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from merakc.ir.graph import Graph, Node, Ref, TensorSpec, map_refs
from merakc.kernels.draws import KEY_POSITION
from merakc.passes.sharding.dims import given
from merakc.passes.sharding.rows import POINTWISE
from merakc.passes.sharding.rules import row_of

CAT = "aten.cat.default"
SPLITS = ("aten.split.Tensor", "aten.split_with_sizes.default", "aten.unsafe_split.Tensor",
          "aten.unsafe_split_with_sizes.default")  # fmt: skip
RESHAPE, PERMUTE = "aten.reshape.default", "aten.permute.default"
ATTENTION = "merakc.attention.default"
# Calls with dims among their arguments, by place, which a dim in front of all moves by one.
MOVED: Mapping[str, Sequence[int]] = {
    "aten.transpose.int": (1, 2),
    "aten.softmax.int": (1,),
    "aten.log_softmax.int": (1,),
    "aten.unsqueeze.default": (1,),
    "aten.squeeze.dim": (1,),
    "aten.select.int": (1,),
    "aten.slice.Tensor": (1,),
}
# Calls on the last dims alone, of a first argument with any in front of them.
LAST = frozenset({"aten.linear.default", "aten.layer_norm.default", "aten.rms_norm.default"})
SAME = frozenset({"aten.contiguous.default", "aten.clone.default", "aten.alias.default"})


class _NotALoopError(Exception):
    """A join of what no loop has made, or one of calls that are not known to be apart."""


def rolled(graph: Graph) -> Graph:
    """The graph with the loops over pieces that it has found as calls on all of them."""
    if not any(n.op in SPLITS for n in graph.nodes):
        return graph
    writer = _Writer(graph)
    for node in graph.nodes:
        writer.add(node)
    return replace(graph, nodes=tuple(writer.nodes)).pruned()


@dataclass(eq=False)
class _Writer:
    graph: Graph
    nodes: list[Node] = field(default_factory=list)
    specs: dict[Ref, TensorSpec] = field(default_factory=dict)
    count: int = 0

    def __post_init__(self) -> None:
        self.makers = {n.name: n for n in self.graph.nodes}
        self.places = {n.name: k for k, n in enumerate(self.graph.nodes)}
        self.specs |= self.graph.specs()
        self.splits = [n for n in self.graph.nodes if n.op in SPLITS]

    def add(self, node: Node) -> None:
        """Adds a node, or what computes the same in the place of a loop that it ends."""
        if node.op == CAT:
            for kind in (_Rows, _Pieces):
                try:
                    made = kind(self, node).joined()
                except _NotALoopError:
                    continue
                self.nodes += made
                return
        self.nodes.append(node)


@dataclass(eq=False)
class _Loop:
    """The loop that a join ends, in lockstep over its pieces."""

    writer: _Writer
    join: Node
    made: list[Node] = field(default_factory=list)
    known: dict[tuple[Ref, ...], Ref | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.ends: tuple[Ref, ...] = self.join.args[0]
        at = self.writer.places[self.join.name]
        like = (n for n in self.writer.splits if len(n.outputs) == len(self.ends))
        before = [n for n in like if self.writer.places[n.name] < at]
        if not before:
            raise _NotALoopError
        self.last = self.writer.places[before[-1].name]
        self.dim = given(self.join, "dim") % len(self.join.spec.shape)

    def joined(self) -> list[Node]:
        """The nodes in the place of the join. Raises `_NotALoopError` where it ends no loop."""
        raise NotImplementedError

    def piece(self, split: Node) -> Ref:
        """All pieces of a split."""
        raise NotImplementedError

    def call(self, node: Node, args: list[Any]) -> Ref:
        """The call on all pieces; each of `args` is a ref of all, or an argument as it was."""
        raise NotImplementedError

    def all_of(self, refs: tuple[Ref, ...]) -> Ref | None:
        """All pieces of a value; None of a value that is the same for each."""
        if refs in self.known:
            return self.known[refs]
        makers = [self.writer.makers.get(r.node) for r in refs]
        first = makers[0]
        outer = first is None or self.writer.places[first.name] <= self.last
        if first is not None and first.op in SPLITS and len(first.outputs) == len(refs):
            if refs != tuple(Ref(first.name, k) for k in range(len(refs))):
                raise _NotALoopError
            self.known[refs] = self.piece(first)
        elif outer or (len(refs) > 1 and len(set(refs)) == 1):
            if len(set(refs)) > 1:
                raise _NotALoopError
            self.known[refs] = None
        else:
            self.known[refs] = self._made(refs, [m for m in makers if m is not None])
        return self.known[refs]

    def _made(self, refs: tuple[Ref, ...], makers: list[Node]) -> Ref | None:
        first = makers[0]
        alike = len(makers) == len(refs) and all(
            (m.op, m.kwargs, m.grad) == (first.op, first.kwargs, first.grad)
            and len(m.args) == len(first.args)
            and len(m.outputs) == len(first.outputs)
            for m in makers
        )
        if not alike or any(r.index != 0 for r in refs) or first.op in KEY_POSITION:
            raise _NotALoopError
        if any(True for _ in _refs(first.kwargs)):
            raise _NotALoopError
        args: list[Any] = []
        inside = False
        for each in zip(*(m.args for m in makers), strict=True):
            if all(isinstance(a, Ref) for a in each):
                found = self.all_of(tuple(each))
                inside |= found is not None
                args.append(each[0] if found is None else _All(found))
            elif any(True for a in each for _ in _refs(a)):
                raise _NotALoopError
            else:
                args.append(each[0] if all(a == each[0] for a in each) else _Unlike(each))
        if not inside:
            if any(m.args != first.args for m in makers):
                raise _NotALoopError
            return None
        return self.call(first, args)

    def write(self, node: Node, op: str, args: tuple[Any, ...], shape: Sequence[int],
              name: str = "", kwargs: tuple[tuple[str, Any], ...] = ()) -> Ref:  # fmt: skip
        """Adds a node where `node` stood."""
        self.writer.count += 1
        name = name or f"{node.name}.all.{self.writer.count}"
        dtype = node.outputs[0].dtype if node.outputs[0] is not None else None
        assert dtype is not None
        spec = TensorSpec(tuple(shape), dtype)
        outputs = (spec, *node.outputs[1:]) if op == node.op and op not in SPLITS else (spec,)
        self.made.append(
            Node(
                name,
                op,
                args,
                kwargs,
                outputs,
                module=node.module,
                source=node.source,
                grad=node.grad,
            )
        )
        self.writer.specs[Ref(name)] = spec
        return Ref(name)

    def shape(self, ref: Ref) -> tuple[int, ...]:
        """The shape of a value."""
        return self.writer.specs[ref].shape


@dataclass(frozen=True, slots=True)
class _All:
    """All pieces, as an argument."""

    ref: Ref


@dataclass(frozen=True, slots=True)
class _Unlike:
    """An argument that is another one for each piece."""

    each: tuple[Any, ...]


def _refs(value: Any) -> Iterator[Ref]:
    found: list[Ref] = []
    map_refs(value, lambda r: found.append(r) or r)  # type: ignore[func-returns-value]
    return iter(found)


class _Rows(_Loop):
    """Pieces of any size along their first dim, of which each row is computed by itself."""

    def joined(self) -> list[Node]:
        whole = self.all_of(self.ends)
        if whole is None or self.dim != 0 or self.shape(whole) != self.join.spec.shape:
            raise _NotALoopError
        self.write(self.join, "aten.alias.default", (whole,), self.shape(whole), self.join.name)
        return self.made

    def piece(self, split: Node) -> Ref:
        if given(split, "dim") % len(self.shape(split.args[0])):
            raise _NotALoopError
        found: Ref = split.args[0]
        return found

    def call(self, node: Node, args: list[Any]) -> Ref:
        inside = [a for a in args if isinstance(a, _All)]
        if len(inside) != 1 or args[0] is not inside[0] or not node.outputs[0]:
            raise _NotALoopError
        x, spec = inside[0].ref, node.outputs[0]
        rows, before = self.shape(x)[0], self.shape(node.args[0])
        each, rest = divmod(spec.shape[0] if spec.shape else 0, before[0] or 1)
        shape = (rows * each, *spec.shape[1:])
        if node.op == RESHAPE:
            inner = math.prod(before[1:]) == each * math.prod(spec.shape[1:])
            if rest or not each or not inner:
                raise _NotALoopError
            return self.write(node, RESHAPE, (x, shape), shape)
        others = [a for a in args[1:] if not isinstance(a, _All)]
        apart = row_of(node.op) == POINTWISE or node.op in LAST or node.op in SAME
        read = [r for a in others for r in _refs(a)]
        fits = node.op in LAST or all(len(self.shape(r)) < len(before) for r in read)
        normed = node.op in LAST and len(before) - 1 < len(_normalised(node))
        if not apart or not fits or normed or spec.shape[0] != before[0] or _has_unlike(args):
            raise _NotALoopError
        return self.write(node, node.op, (x, *args[1:]), shape, kwargs=node.kwargs)


def _normalised(node: Node) -> tuple[int, ...]:
    """The sizes over which a norm is taken; of a product, its one."""
    found: tuple[int, ...] = (0,) if "linear" in node.op else given(node, "normalized_shape")
    return found


def _has_unlike(args: Sequence[Any]) -> bool:
    return any(isinstance(a, _Unlike) for a in args)


class _Pieces(_Loop):
    """Pieces of one size, in a dim in front of all others."""

    def joined(self) -> list[Node]:
        shapes = {self.shape(r) for r in self.ends}
        whole = self.all_of(self.ends) if len(shapes) == 1 else None
        if whole is None:
            raise _NotALoopError
        count, *own = self.shape(whole)
        order = (*range(1, self.dim + 1), 0, *range(self.dim + 1, len(own) + 1))
        turned = [self.shape(whole)[k] for k in order]
        x = whole if self.dim == 0 else self.write(self.join, PERMUTE, (whole, order), turned)
        shape = self.join.spec.shape
        assert math.prod(shape) == count * math.prod(own)
        self.write(self.join, RESHAPE, (x, shape), shape, self.join.name)
        return self.made

    def piece(self, split: Node) -> Ref:
        sizes = {o.shape for o in split.outputs if o is not None}
        if len(sizes) != 1:
            raise _NotALoopError
        (own,) = sizes
        dim = given(split, "dim") % len(own)
        apart = (*own[:dim], len(split.outputs), *own[dim:])
        x = self.write(split, RESHAPE, (split.args[0], apart), apart)
        order = (dim, *(k for k in range(len(apart)) if k != dim))
        turned = [apart[k] for k in order]
        return x if dim == 0 else self.write(split, PERMUTE, (x, order), turned)

    def call(self, node: Node, args: list[Any]) -> Ref:
        spec = node.outputs[0]
        if spec is None or _has_unlike(args):
            raise _NotALoopError
        shape = (len(self.ends), *spec.shape)
        lift = _LIFTS.get(node.op)
        if lift is None and row_of(node.op) == POINTWISE:
            lift = _pointwise
        if lift is None:
            raise _NotALoopError
        return lift(self, node, args, shape)


Lift = Callable[[_Pieces, Node, list[Any], tuple[int, ...]], Ref]


def _plain(args: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(a.ref if isinstance(a, _All) else a for a in args)


def _pointwise(loop: _Pieces, node: Node, args: list[Any], shape: tuple[int, ...]) -> Ref:
    """Dims are met from the last: pieces of fewer dims get ones behind that of the pieces."""
    found: list[Any] = []
    for arg in args:
        if not isinstance(arg, _All):
            found.append(arg)
            continue
        count, *own = loop.shape(arg.ref)
        padded = (count, *[1] * (len(shape) - 1 - len(own)), *own)
        same = len(padded) == len(own) + 1
        found.append(arg.ref if same else loop.write(node, RESHAPE, (arg.ref, padded), padded))
    return loop.write(node, node.op, tuple(found), shape, kwargs=node.kwargs)


def _moved(loop: _Pieces, node: Node, args: list[Any], shape: tuple[int, ...]) -> Ref:
    """Dims are counted from the first, and one further."""
    rank = len(loop.shape(node.args[0])) + (node.op == "aten.unsqueeze.default")
    now = list(_plain(args))
    for k in MOVED[node.op]:
        if k < len(now):
            now[k] = now[k] % rank + 1
    if not isinstance(args[0], _All) or len(now) <= MOVED[node.op][-1]:
        raise _NotALoopError
    return loop.write(node, node.op, tuple(now), shape, kwargs=node.kwargs)


def _permuted(loop: _Pieces, node: Node, args: list[Any], shape: tuple[int, ...]) -> Ref:
    rank = len(args[1])
    order = (0, *(d % rank + 1 for d in args[1]))
    return loop.write(node, node.op, (args[0].ref, order), shape)


def _reshaped(loop: _Pieces, node: Node, args: list[Any], shape: tuple[int, ...]) -> Ref:
    return loop.write(node, node.op, (args[0].ref, shape), shape)


def _on_last(loop: _Pieces, node: Node, args: list[Any], shape: tuple[int, ...]) -> Ref:
    if not isinstance(args[0], _All) or any(isinstance(a, _All) for a in args[1:]):
        raise _NotALoopError
    return loop.write(node, node.op, _plain(args), shape, kwargs=node.kwargs)


def _multiplied(loop: _Pieces, node: Node, args: list[Any], shape: tuple[int, ...]) -> Ref:
    """Matrices of pieces with those of others, of as many dims, or with one for all."""
    ranks = [len(loop.shape(a.ref if isinstance(a, _All) else a)) for a in args]
    one_for_all = isinstance(args[0], _All) and not isinstance(args[1], _All) and ranks[1] == 2
    both = all(isinstance(a, _All) for a in args) and ranks[0] == ranks[1] > 2
    if not (both or (one_for_all and ranks[0] > 2)):
        raise _NotALoopError
    return loop.write(node, node.op, _plain(args), shape, kwargs=node.kwargs)


def _attended(loop: _Pieces, node: Node, args: list[Any], shape: tuple[int, ...]) -> Ref:
    """Pieces stand among the samples."""
    if not all(isinstance(a, _All) for a in args[:3]) or args[3] is not None:
        raise _NotALoopError
    flat = []
    for arg in args[:3]:
        count, samples, *own = loop.shape(arg.ref)
        merged = (count * samples, *own)
        flat.append(loop.write(node, RESHAPE, (arg.ref, merged), merged))
    merged = (shape[0] * shape[1], *shape[2:])
    outputs = tuple(
        None if o is None else TensorSpec((shape[0] * o.shape[0], *o.shape[1:]), o.dtype)
        for o in node.outputs
    )
    ref = loop.write(node, node.op, (*flat, *args[3:]), merged, kwargs=node.kwargs)
    loop.made[-1] = replace(loop.made[-1], outputs=outputs)
    return loop.write(node, RESHAPE, (ref, shape), shape)


_LIFTS: Mapping[str, Lift] = {
    **dict.fromkeys(MOVED, _moved),
    **dict.fromkeys(LAST | SAME, _on_last),
    PERMUTE: _permuted,
    RESHAPE: _reshaped,
    "aten.matmul.default": _multiplied,
    ATTENTION: _attended,
}
