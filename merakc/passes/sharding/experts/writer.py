"""Writes what runs on the ranks that have the experts: rows go there, and their results back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from merakc.ir.graph import Node, Ref, TensorSpec, map_refs
from merakc.passes.sharding.layouts import Dispatched, Sharding

STACK = "aten.stack.default"


class ExpertWriter:
    """What `merakc.passes.sharding.spmd.SpmdPartitioner` writes of experts."""

    whole: Sharding
    axis: str
    rank: int
    specs: Mapping[Ref, TensorSpec]
    nodes: list[Node]
    made: set[str]
    now: dict[Ref, Ref]
    sent: dict[Ref, Ref]  # values where the experts are

    def enter(self, ref: Ref) -> Ref:
        """A value as a node on split dims reads it."""
        raise NotImplementedError

    def local_spec(self, ref: Ref) -> TensorSpec:
        """Shape and dtype of this rank's part of a value."""
        raise NotImplementedError

    def local_shape(self, node: Node, index: int = 0) -> tuple[int, ...]:
        """The local shape of one of the node's outputs."""
        raise NotImplementedError

    def write_dispatched(self, node: Node, home: Dispatched) -> None:
        """Adds a node that computes on the rows of this rank's experts."""
        outputs = tuple(
            o and TensorSpec((home.rows, *self.local_shape(node, k)[1:]), o.dtype)
            for k, o in enumerate(node.outputs)
        )
        args, kwargs = (
            map_refs(a, lambda r: self.at_experts(r, home)) for a in (node.args, node.kwargs)
        )
        self.nodes.append(replace(node, args=args, kwargs=kwargs, outputs=outputs))
        if node.name in home.exits:
            spec = self.local_spec(Ref(node.name))
            args = (
                Ref(node.name),
                self.all_ends(home),
                self.axis,
                home.experts,
                self.rank,
                spec.shape[0],
            )
            name, op = f"{node.name}.combine", "merakc.combine.default"
            self.nodes.append(
                replace(node, name=name, op=op, args=args, kwargs=(), outputs=(spec,))
            )
            self.now[Ref(node.name)] = Ref(name)

    def is_stack(self, node: Node) -> bool:
        """Whether a node stacks parameters of which each is whole on one rank, and read there."""
        if node.op != STACK or not self.whole.gathered.isdisjoint(node.args[0]):
            return False
        layouts = [self.whole.layouts[ref] for ref in node.args[0]]
        return all(any(f.on is not None for dim in lay.dims for f in dim) for lay in layouts)

    def write_stack(self, node: Node) -> None:
        """Adds the stack of this rank's own: all ranks make the same calls, of others' parameters
        with nothing.
        """
        parts = []
        for k, ref in enumerate(node.args[0]):
            spec, full = self.local_spec(ref), self.specs[ref].shape
            shape = (int(spec.numel > 0), *full)
            name = f"{node.name}.{k}.own"
            args: tuple[Any, ...] = (self.enter(ref), shape)
            made = TensorSpec(shape, spec.dtype)
            self.nodes.append(
                replace(node, name=name, op="aten.reshape.default", args=args, kwargs=(),
                        outputs=(made,))
            )  # fmt: skip
            parts.append(Ref(name))
        args, spec = (tuple(parts), 0), self.local_spec(Ref(node.name))
        self.nodes.append(
            replace(node, op="aten.cat.default", args=args, kwargs=(), outputs=(spec,))
        )

    def at_experts(self, ref: Ref, home: Dispatched) -> Ref:
        """A value as the experts' ranks read it."""
        if ref.node in home.nodes:
            return ref
        if ref != home.ends and ref not in home.sorted_rows:
            return self.enter(ref)
        if ref not in self.sent:
            args: tuple[Any, ...] = (self.all_ends(home), home.experts, self.rank)
            name, op = f"{ref.node}.own", "merakc.own_ends.default"
            spec = TensorSpec((home.experts[self.rank],), self.specs[ref].dtype)
            if ref != home.ends:
                name, op = f"{ref.node}.{ref.index}.dispatch", "merakc.dispatch.default"
                args = (self.enter(ref), args[0], self.axis, *args[1:], home.rows)
                spec = TensorSpec(
                    (home.rows, *self.local_spec(ref).shape[1:]), self.specs[ref].dtype
                )
            self.nodes.append(Node(name, op, args, (), (spec,)))
            self.sent[ref] = Ref(name)
        return self.sent[ref]

    def all_ends(self, home: Dispatched) -> Ref:
        """Where the groups of every rank's rows end."""
        name = f"{home.ends.node}.all_gather0"
        if name not in self.made:
            own = self.specs[home.ends]
            spec = TensorSpec((own.shape[0] * self.whole.tp,), own.dtype)
            sizes = (own.shape[0],) * self.whole.tp
            args = (home.ends, self.axis, 0, sizes, self.rank)
            self.nodes.append(Node(name, "merakc.all_gather.default", args, (), (spec,)))
            self.made.add(name)
        return Ref(name)
