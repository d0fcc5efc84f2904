"""Writes a loop over experts as rows that are sorted by expert.

An element of the masks, a *slot*, is a row of one expert: of a token, and one of its choices. Slots
are numbered with the dim in front that says where results go, so that those of a token follow each
other. `experts` is the number of a slot's expert, as many as there are where it has none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from merakc.frontend.values.symbols import Number
from merakc.ir.graph import Graph, Node, Ref, TensorSpec, map_refs
from merakc.kernels.opaque import REACHED, Call, enter
from merakc.passes.sharding.experts.ends import GROUPED
from merakc.passes.sharding.experts.tame import is_tame
from merakc.passes.sharding.experts.turns import INDEX, Read, Turn
from merakc.passes.sharding.rows import POINTWISE
from merakc.passes.sharding.rules import row_of

RESHAPE, STACK = "aten.reshape.default", "aten.stack.default"
WIDER = "aten.unsqueeze.default"
MUL, ADD = "aten.mul.Tensor", "aten.add.Tensor"
CLAMP, GATHER = "aten.clamp_max.default", "aten.gather.default"
# Norms of rows, and which arguments scale and shift what they give.
NORMS: Mapping[str, tuple[int, int | None]] = {
    "aten.layer_norm.default": (2, 3),
    "aten.rms_norm.default": (2, None),
}
LINEAR, PRODUCTS = "aten.linear.default", ("aten.matmul.default", "aten.mm.default")


class OwnParametersError(Exception):
    """A line, and how it reads an expert's parameters, or computes on rows, as a sort cannot."""


class LoopWriter:
    """The nodes of one loop; `own` are the parameters of all experts by those of the first, of
    which those have no gradient whose expert, by `marks`, has no rows. Rows of `varied` values are
    read of the expert's own.
    """

    def __init__(
        self, graph: Graph, turns: Sequence[Turn], own: Mapping[Ref, tuple[Ref, ...]],
        marks: Mapping[str, int], varied: Mapping[Ref, tuple[Ref, ...]], *, covers: bool,
    ) -> None:  # fmt: skip
        self.turns, self.first, self.own, self.covers = turns, turns[0], own, covers
        self.last, self.marks, self.varied = turns[-1].node, marks, varied
        self.functions: dict[str, Call] = {}  # what notes which experts have rows
        self.nodes: list[Node] = []
        self.body: list[Node] = []  # what computes on rows
        self.specs: dict[Ref, TensorSpec] = dict(graph.specs())
        self.count = len(turns)
        mask, target = self.first.mask, self.first.target
        assert mask is not None
        assert target is not None
        self.target, shape = target, self.specs[mask].shape
        self.grid = (self.first.dim, *(k for k in range(len(shape)) if k != self.first.dim))
        self.slots = math.prod(shape)
        self.choices = self.slots // max(shape[self.first.dim], 1)
        self.stacks: dict[Ref, Ref] = {}

    def run(self) -> Ref:
        """Writes all; the value that the last turn gave."""
        self._sort()
        now: dict[Ref, Ref] = {}
        for node in self.first.calls:
            if not self.covers and not is_tame(node, self.first.calls):
                raise OwnParametersError(
                    node.source,
                    f"{node.op} would be computed of rows that no expert has, and its gradient may "
                    "be infinite there",
                )
            self._call(node, now)
        assert self.first.made is not None
        return self._back(now[self.first.made])

    def add(
        self, what: str, op: str, args: tuple[Any, ...], spec: Any, *,
        kwargs: Any = (), like: Node | None = None,
    ) -> Ref:  # fmt: skip
        """Adds a node, of a shape and dtype or several, with the line of another."""
        name, source = f"{self.last.name}.{what}", like or self.last
        outputs = spec if isinstance(spec, list) else [spec]
        outs = tuple(o and TensorSpec(tuple(o[0]), o[1]) for o in outputs)
        about = source.module, source.source, source.grad
        node = Node(name, op, args, kwargs, outs, *about)
        self.nodes.append(node)
        self.specs |= {Ref(name, k): o for k, o in enumerate(outs) if o is not None}
        return Ref(name)

    def _sort(self) -> None:
        """The numbers of slots' experts, in order, and where each expert's end."""
        count, slots, number = self.count, self.slots, torch.int64
        flat = [self._flat(t.mask, f"mask{k}") for k, t in enumerate(self.turns)]
        hits = self.add(
            "hits", STACK, (tuple(flat), 0), ((count, slots), self.specs[flat[0]].dtype)
        )
        if self.specs[hits].dtype != torch.bool:
            hits = self.add("true", "aten.ne.Scalar", (hits, 0), ((count, slots), torch.bool))
        hits = self.add("ones", "aten.to.dtype", (hits, number), ((count, slots), number))
        each = self.add("less", "aten.arange.start", (-count, 0), ((count,), number))
        each = self.add("each", "aten.unsqueeze.default", (each, 1), ((count, 1), number))
        less = self.add("hit", "aten.mul.Tensor", (hits, each), ((count, slots), number))
        one = self.add("one", "aten.sum.dim_IntList", (less, (0,)), ((slots,), number))
        own = (slots,), number
        self.experts = self.add("experts", "aten.add.Tensor", (one, count), own)
        if self.marks:
            self.experts = self.add("reached", REACHED, (self.experts, self._noting()), own)
        ids = self.add("sort", "aten.sort.stable", (self.experts,), [own, own],
                       kwargs=(("stable", True),))  # fmt: skip
        self.order = Ref(ids.node, 1)
        bounds = self.add("bounds", "aten.arange.default", (count,), ((count,), number))
        self.ends = self.add(
            "ends", "aten.searchsorted.Tensor", (ids, bounds), ((count,), torch.int32),
            kwargs=(("out_int32", True), ("right", True)),
        )  # fmt: skip
        self.ids = ids
        if not self.covers:  # of a stack there is none for slots without an expert
            self.ids = self.add("known", CLAMP, (ids, count - 1), own)
        self.tokens = self.order
        if self.choices > 1:
            args = self.order, self.choices
            self.tokens = self.add("tokens", "aten.floor_divide.default", args, own)
        self.back = self._inverse()

    def _noting(self) -> str:
        call = Call(list, (), self.last.module, self.last.source, marks=self.marks)
        key = enter(call)
        self.functions[key] = call
        return key

    def _inverse(self) -> Ref:
        own = (self.slots,), torch.int64
        empty = self.add("empty", "aten.empty_like.default", (self.order,), own)
        places = self.add("places", "aten.arange.default", (self.slots,), own)
        return self.add(
            "back", "aten.index_put.default", (empty, (self.order,), places, False), own
        )

    def _flat(self, ref: Ref | None, what: str, along: Sequence[int] | None = None) -> Ref:
        """A value with dims of the masks, `along` these of them, as one of slots."""
        assert ref is not None
        spec, grid = self.specs[ref], self.grid
        along = range(len(grid)) if along is None else along
        rest = [*range(len(grid), len(spec.shape))]
        order = (*(list(along).index(k) for k in grid), *rest)
        shape = tuple(spec.shape[k] for k in order)
        if order != tuple(range(len(order))):
            ref = self.add(
                f"{what}.turned", "aten.permute.default", (ref, order), (shape, spec.dtype)
            )
        if len(grid) == 1:
            return ref
        flat = (self.slots, *(spec.shape[k] for k in rest))
        return self.add(f"{what}.flat", RESHAPE, (ref, flat), (flat, spec.dtype))

    def _call(self, node: Node, now: dict[Ref, Ref]) -> None:
        """Adds a call of the body, on the rows of all experts."""
        name = node.name.rpartition("/")[2]
        outputs = [o and ((self.slots, *o.shape[1:]), o.dtype) for o in node.outputs]
        if Ref(node.name) in self.first.reads:
            now[Ref(node.name)] = self._read(node, name, self.first.reads[Ref(node.name)])
            return
        mine = [r for r in node.refs if r in self.own]
        args, kwargs = (map_refs(_sized(a, self.slots), lambda r: now.get(r, r))
                        for a in (node.args, node.kwargs))  # fmt: skip
        if mine and node.op in (LINEAR, *PRODUCTS):
            made = self._product(node, name, args)
        elif mine and node.op in NORMS:
            made = self._norm(node, name, args)
        else:
            if mine and (row_of(node.op) != POINTWISE):
                raise OwnParametersError(node.source, f"{node.op} reads parameters of its expert's")
            each = {r: self._each(r, node) for r in mine}
            args = map_refs(args, lambda r: each.get(r, r))
            start = len(self.nodes)
            made = self.add(f"of.{name}", node.op, args, outputs, kwargs=kwargs, like=node)
            self.body += self.nodes[start:]
        now.update({Ref(node.name, k): Ref(made.node, k) for k in range(len(node.outputs))})

    def _read(self, node: Node, name: str, read: Read) -> Ref:
        spec = self.specs[read.of]
        if read.of in self.varied:
            return self._read_own(node, name, read)
        if read.lead:
            spec = TensorSpec(spec.shape[read.lead :], spec.dtype)
            rows = self.add(f"of.{name}.rows", RESHAPE, (read.of, spec.shape), spec, like=node)
            read = Read(rows, read.along)
        if read.along == (self.grid[0],):
            source, by = read.of, self.tokens
        elif sorted(read.along) == sorted(self.grid) and self._fits(read):
            source, by = self._flat(read.of, f"of.{name}", read.along), self.order
        else:
            raise OwnParametersError(node.source, "a tensor is read by the choice, and not the row")
        shape = (self.slots, *spec.shape[len(read.along) :])
        return self.add(f"of.{name}", INDEX, (source, (by,)), (shape, spec.dtype), like=node)

    def _read_own(self, node: Node, name: str, read: Read) -> Ref:
        """Numbers, of which each expert has others, for each row or each choice."""
        whole = read.along == (self.grid[0],)
        count = self.slots // self.choices if whole else self.slots
        spec, made = self.specs[read.of], node.spec
        if spec.numel != count or not (whole or read.along == self.grid) or read.lead:
            raise OwnParametersError(node.source, "each expert reads rows of a tensor of its own")
        flat = [
            self.add(f"{name}.row{k}", RESHAPE, (ref, (count,)), ((count,), spec.dtype), like=node)
            for k, ref in enumerate(self.varied[read.of])
        ]
        columns = (count, self.count), spec.dtype
        stack = self.add(f"{name}.all", STACK, (tuple(flat), 1), columns, like=node)
        shape = (count, self.slots // count)
        of, number = self.experts, torch.int64
        if not self.covers:
            args = of, self.count - 1
            of = self.add(f"{name}.known", CLAMP, args, ((self.slots,), number), like=node)
        ids = self.add(f"{name}.ids", RESHAPE, (of, shape), (shape, number), like=node)
        of_own = (stack, 1, ids), (shape, spec.dtype)
        each = self.add(f"{name}.each", GATHER, *of_own, like=node)
        flat_shape = (self.slots, *(1 for _ in made.shape[1:]))
        rows = flat_shape, spec.dtype
        each = self.add(f"{name}.flat", RESHAPE, (each, flat_shape), rows, like=node)
        return self.add(f"of.{name}", INDEX, (each, (self.order,)), rows, like=node)

    def _fits(self, read: Read) -> bool:
        assert self.first.mask is not None
        shape = self.specs[self.first.mask].shape
        return self.specs[read.of].shape[: len(shape)] == tuple(shape[k] for k in read.along)

    def _stack(self, ref: Ref) -> Ref:
        """The parameters of all experts that stand where this one of the first does."""
        if ref not in self.stacks:
            spec, name = self.specs[ref], f"of.{ref.node}"
            shape = (self.count, *spec.shape)
            self.stacks[ref] = self.add(name, STACK, (self.own[ref], 0), (shape, spec.dtype))
        return self.stacks[ref]

    def _each(self, ref: Ref, node: Node) -> Ref:
        """For each row the parameter of its expert, with as many dims as a result has."""
        spec, rows = self.specs[ref], node.spec.shape
        missing = len(rows) - 1 - len(spec.shape)
        if missing < 0:
            raise OwnParametersError(node.source, f"{node.op} reads parameters of more dims")
        shape, name = (self.slots, *spec.shape), f"{node.name.rpartition('/')[2]}.{ref.node}"
        args = self._stack(ref), (self.ids,)
        each = self.add(name, INDEX, args, (shape, spec.dtype), like=node)
        for k in range(missing):
            wide = (self.slots, *(1 for _ in range(k + 1)), *spec.shape), spec.dtype
            each = self.add(f"{name}.wide{k}", WIDER, (each, 1), wide, like=node)
            self.body.append(self.nodes[-1])
        return each

    def _norm(self, node: Node, name: str, args: tuple[Any, ...]) -> Ref:
        """A norm of rows, and the scale and shift of their experts behind it."""
        scale, shift = NORMS[node.op]
        own = {k: args[k] for k in (scale, shift) if k is not None and len(args) > k}
        if args[0] in self.own:
            raise OwnParametersError(node.source, f"{node.op} reads parameters of its expert's")
        args = tuple(None if k in own else arg for k, arg in enumerate(args))
        by = {k: self._each(r, node) if r in self.own else r for k, r in own.items() if r}
        spec, start = ((self.slots, *node.spec.shape[1:]), node.spec.dtype), len(self.nodes)
        made = self.add(f"of.{name}", node.op, args, spec, kwargs=node.kwargs, like=node)
        for k, what, op in ((scale, "scale", MUL), (shift, "shift", ADD)):
            if k in by:
                made = self.add(f"of.{name}.{what}", op, (made, by[k]), spec, like=node)
        self.body += self.nodes[start:]
        return made

    def _product(self, node: Node, name: str, args: tuple[Any, ...]) -> Ref:
        x, weight, *bias = args
        if len(self.specs[x].shape) != 2 or weight not in self.own or x in self.own:
            raise OwnParametersError(node.source, f"{node.op} reads parameters of its expert's")
        matrices, (rows, columns) = self._stack(weight), self.specs[weight].shape
        dtype, start = node.spec.dtype, len(self.nodes)
        if node.op == LINEAR:
            args = (matrices, 1, 2)
            rows, columns = columns, rows
            matrices = self.add(f"of.{name}.t", "aten.transpose.int", args,
                                ((self.count, rows, columns), dtype), like=node)  # fmt: skip
            start = len(self.nodes)
        spec = (self.slots, columns), dtype
        made = self.add(f"of.{name}", GROUPED, (x, matrices, self.ends), spec, like=node)
        self.body += self.nodes[start:]
        if bias and bias[0] is not None:
            each = self._each(bias[0], node) if bias[0] in self.own else bias[0]
            made = self.add(f"of.{name}.bias", "aten.add.Tensor", (made, each), spec, like=node)
            self.body.append(self.nodes[-1])
        return made

    def _back(self, made: Ref) -> Ref:
        """What is made of each slot, added to the rows of what is written to, or written there."""
        spec, into = self.specs[made], self.specs[self.target]
        if into != ((self.slots // self.choices, *spec.shape[1:]), spec.dtype):
            raise OwnParametersError(
                self.last.source, "what is written to has not as many rows as the masks"
            )
        made = self.add("home", INDEX, (made, (self.back,)), spec)
        if not self.covers:
            args: tuple[Any, ...] = (self.experts, self.count)
            none = self.add("none", "aten.ge.Scalar", args, ((self.slots,), torch.bool))
            shape = (self.slots, *(1 for _ in spec.shape[1:]))
            none = self.add("nothing", RESHAPE, (none, shape), (shape, torch.bool))
            if not self.first.adds:
                return self.add("out", "aten.where.self", (none, self.target, made), into)
            made = self.add("some", "aten.masked_fill.Scalar", (made, none, 0), spec)
        elif not self.first.adds:
            return made
        if self.choices > 1:
            shape = (self.slots // self.choices, self.choices, *spec.shape[1:])
            made = self.add("choices", RESHAPE, (made, shape), (shape, spec.dtype))
            made = self.add("sum", "aten.sum.dim_IntList", (made, (1,)), into)
        return self.add("out", "aten.add.Tensor", (self.target, made), into)


def _sized(value: Any, rows: int) -> Any:
    """Arguments in which as many rows are there as there are slots."""
    if isinstance(value, Number):
        return rows
    if isinstance(value, tuple) and not isinstance(value, Ref):
        return tuple(_sized(v, rows) for v in value)
    return value
