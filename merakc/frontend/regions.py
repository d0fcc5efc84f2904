"""Calls whose shapes or numbers depend on values become one node, which runs them as they are.

Such a region reaches from the first value whose shape depends on the data to where shapes are the
same for all data again: `losses[mask].mean()` is one of two calls. What only the batch stands
before (the places of a mask) is made again in each region that reads it, so that layers that read
one mask have a region each.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from heapq import heappop, heappush
from math import prod
from typing import Any

import torch
from torch import Tensor

from merakc.costs.work.flops import node_flops
from merakc.errors import RecordError
from merakc.frontend.calls.ragged import CTC
from merakc.frontend.values.idle import Skip
from merakc.frontend.values.reads import Sources, Symbolic, read_refs, run_node
from merakc.frontend.values.symbols import ITEM, Number, has_number, numbers
from merakc.ir.graph import Graph, InputKind, Node, Ref, TensorSpec, map_refs
from merakc.kernels.draws import KEY_POSITION
from merakc.kernels.opaque import OPAQUE, Call, Spec, enter

# Calls whose results have as many elements as values say, also where a recording was told how many.
SIZED = frozenset(
    {"aten.nonzero.default", "aten.masked_select.default", "aten._unique2.default",
     "aten.unique_dim.default", "aten.unique_consecutive.default", "aten.repeat_interleave.Tensor"}
)  # fmt: skip
_SYMBOL = re.compile(r"\b(?:u|zuf|read)\d+\b")
WHY = "shapes or numbers depend on the data"


def with_regions(graph: Graph, sources: Sources, number: int, skips: Sequence[Skip] = ()) -> Graph:
    """The graph with a node for each region, of which some calls have `skips`; regions are numbered
    from `number` on.

    Raises `RecordError` where a shape that depends on the data leaves the forward.
    """
    if not sources and not any(map(_is_dynamic, graph.nodes)):
        return graph
    wanted = {o.ref.node for o in graph.outputs}
    live = []
    for node in reversed(graph.nodes):
        if node.name in wanted:
            live.append(node)
            wanted.update(r.node for r in read_refs(node, sources))
    skipped = {name: skip for skip in skips for name in skip.nodes}
    return _Finder(replace(graph, nodes=tuple(reversed(live))), sources, number, skipped).run()


def _is_dynamic(node: Node) -> bool:
    """Whether a node reads or makes a number, or a shape, that depends on values.

    What reads a tensor of such a shape, and makes none, is for the graph to say.
    """
    shapes = tuple([o.shape for o in node.outputs if o is not None])
    if node.op in SIZED:
        return "output_size" not in dict(node.kwargs)
    whole = node.op in CTC or node.op.startswith("ragged.")
    return whole or node.op == ITEM or has_number((node.args, node.kwargs, shapes))


@dataclass(eq=False)
class Region:
    """Calls in their order, the values that they read, and those that others read of them.

    Those that have `skips` are passed over where no element of a mask is true.
    """

    nodes: Sequence[Node]
    inputs: Sequence[Ref]
    outputs: Sequence[Ref]
    sources: Sources
    functions: Mapping[str, Callable[..., Any]]
    skips: Mapping[str, Skip] = field(default_factory=dict)

    def __call__(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Runs the calls, under whatever gradient mode there is.

        Raises `RecordError` with the user's line where one of them does not take what it is given.
        """
        values: dict[Ref, Any] = dict(zip(self.inputs, inputs, strict=True))
        symbols = Symbolic(self.sources, values.__getitem__)
        hit: dict[Ref, bool] = {}
        for node in self.nodes:
            skip = self.skips.get(node.name)
            if skip is not None:
                if skip.mask not in hit:
                    hit[skip.mask] = bool(values[skip.mask].any())
                if not hit[skip.mask]:
                    values |= {r: values[skip.same[r]] for r in node.outs if r in skip.same}
                    continue
            try:
                outs = run_node(node, values.__getitem__, symbols, self.functions)
            except (RuntimeError, IndexError) as error:
                if type(error) not in (RuntimeError, IndexError):  # of memory, or of fake tensors
                    raise
                raise RecordError(
                    f"{node.source}: this call fails on the batch: {type(error).__name__}: {error};"
                    " mend the batch; or, where a tensor of it is not as it should be for its "
                    "samples, say where they stand: auto_parallel(..., batch_dims={name: dim})"
                ) from error
            values |= {Ref(node.name, k): out for k, out in enumerate(outs)}
        return [values[ref] for ref in self.outputs]

    @property
    def digest(self) -> str:
        """What it computes, in short."""
        renamed = {r: Ref(f"in{k}", r.index) for k, r in enumerate(self.inputs)}
        text = "\n".join(
            str(replace(n, args=map_refs(n.args, lambda r: renamed.get(r, r)))) for n in self.nodes
        )
        skips = dict.fromkeys(self.skips.get(n.name) for n in self.nodes)
        text += "".join(f"\nskips {skip.place}" for skip in skips if skip is not None)
        order: dict[str, str] = {}  # symbols are numbered through all recordings
        text = _SYMBOL.sub(lambda m: order.setdefault(m[0], f"s{len(order)}"), text)
        return hashlib.sha256(text.encode()).hexdigest()[:8]


@dataclass(eq=False)
class _Finder:
    """Finds the regions of a graph and puts nodes in their place."""

    graph: Graph
    sources: Sources
    number: int
    skips: Mapping[str, Skip] = field(default_factory=dict)
    place: dict[str, int] = field(default_factory=dict)  # of a node in the graph
    units: dict[str, str] = field(default_factory=dict)  # the first node of each node's unit

    @cached_property
    def specs(self) -> Mapping[Ref, TensorSpec]:
        return self.graph.specs()

    @cached_property
    def nodes(self) -> dict[str, Node]:
        return {n.name: n for n in self.graph.nodes}

    @cached_property
    def names(self) -> list[str]:
        return list(self.nodes)

    @cached_property
    def dynamic(self) -> set[str]:
        """The nodes that are to be in a region."""
        found: set[str] = set()
        for node in self.graph.nodes:
            masked = node.op == "aten.index.Tensor" and any(map(self._is_mask, node.args[1]))
            if _is_dynamic(node) or masked or any(map(self._has_values, node.refs)):
                found.add(node.name)
        return found

    @cached_property
    def free(self) -> set[str]:
        """Those of them that are made again where they are read: numbers, and what only the batch
        stands before.
        """
        kinds = (InputKind.BATCH, InputKind.CONSTANT)
        batch = {i.name for i in self.graph.inputs if i.kind in kinds}
        for node in self.graph.nodes:
            if all(r.node in batch for r in self._reads(node)):
                batch.add(node.name)
        return {n for n in self.dynamic if n in batch or self.nodes[n].op == ITEM}

    def _has_values(self, ref: Ref) -> bool:
        """Whether the shape of a value depends on the data."""
        spec = self.specs.get(ref)
        return spec is not None and any(True for _ in numbers(spec.shape))

    def _is_mask(self, index: Ref | None) -> bool:
        return index is not None and self.specs[index].dtype in (torch.bool, torch.uint8)

    def _reads(self, node: Node) -> list[Ref]:
        return read_refs(node, self.sources)

    def _inside(self, node: Node) -> list[Ref]:
        """The references of a node that only a region can hold."""
        return [r for r in self._reads(node) if r not in self.specs or self._has_values(r)]

    def run(self) -> Graph:
        """The graph with its regions as nodes."""
        self.place |= {name: k for k, name in enumerate(self.nodes)}
        self._check_results()
        read = {r for n in self.graph.nodes for r in n.refs} | {o.ref for o in self.graph.outputs}
        exits = {r.node for r in read if r in self.specs and not self._has_values(r)}
        # Free nodes stand for themselves only where what they make leaves the region.
        kept = [n for n in self.nodes if n not in self.free or n in exits]
        self.units |= {name: name for name in kept}
        for name in kept:
            if name in self.dynamic and name not in self.free:
                for ref in self._inside(self.nodes[name]):
                    if ref.node not in self.free:
                        self._join(name, ref.node)
        for unit, members in self._members().items():
            if unit in self.dynamic:
                self._close(members)
        order = self._ordered()
        wanted = {o.ref for o in self.graph.outputs}.union(*map(self._before, order))
        nodes: list[Node] = []
        functions = dict(self.graph.functions)
        renamed: dict[Ref, Ref] = {}
        for members in order:
            if not self._is_region(members):
                nodes.append(self.nodes[members[0]])
                continue
            made, call, outs = self._node(members, wanted)
            functions[made.args[-1]] = call
            nodes.append(made)
            renamed |= {ref: Ref(made.name, k) for k, ref in enumerate(outs)}
        return replace(self.graph, nodes=tuple(nodes), functions=functions).renamed(renamed)

    def _check_results(self) -> None:
        for out in self.graph.outputs:
            if out.ref not in self.specs or self._has_values(out.ref):
                raise RecordError(
                    f"{self.nodes[out.ref.node].source}: the shape of '{out.name}', which the "
                    "forward returns, depends on the data; return a tensor of one shape for all "
                    "batches, as by torch.where in place of a selection"
                )

    # Units: a region, or a node that is in none

    def _unit(self, name: str) -> str:
        while self.units[name] != name:
            name = self.units[name]
        return name

    def _join(self, one: str, other: str) -> None:
        first, second = sorted((self._unit(one), self._unit(other)), key=self.place.__getitem__)
        self.units[second] = first

    def _members(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for name in self.units:
            found.setdefault(self._unit(name), []).append(name)
        return found

    def _is_region(self, members: Sequence[str]) -> bool:
        return len(members) > 1 or members[0] in self.dynamic

    def _before(self, members: Sequence[str]) -> set[Ref]:
        """The values that a unit reads of other units."""
        whole = set(self._copied(members)) if self._is_region(members) else set(members)
        return {r for n in whole for r in self._reads(self.nodes[n]) if r.node not in whole}

    def _close(self, members: Sequence[str]) -> None:
        """Joins with a unit all that stands between two nodes of it."""
        names = self.names[self.place[members[0]] : self.place[members[-1]] + 1]
        after, before = set(members), set(members)
        for node in map(self.nodes.__getitem__, names):
            if any(r.node in after for r in self._reads(node)):
                after.add(node.name)
        for node in map(self.nodes.__getitem__, reversed(names)):
            if node.name in before:
                before.update(r.node for r in self._reads(node))
        for other in after & before:
            if other in self.units:
                self._join(members[0], other)

    def _copied(self, members: Iterable[str]) -> list[str]:
        """The members of a region with the free nodes that they read, in the graph's order."""
        found = set(members)
        waiting = list(found)
        while waiting:
            for ref in self._inside(self.nodes[waiting.pop()]):
                if ref.node not in found and ref.node in self.nodes:
                    found.add(ref.node)
                    waiting.append(ref.node)
        return sorted(found, key=self.place.__getitem__)

    def _ordered(self) -> list[list[str]]:
        """The units in an order in which they can run; those that read each other are joined."""
        while True:
            units = self._members()
            sorter: TopologicalSorter[str] = TopologicalSorter()
            for unit, members in units.items():
                before = {self._unit(r.node) for r in self._before(members) if r.node in self.units}
                sorter.add(unit, *(before - {unit}))
            try:
                sorter.prepare()
            except CycleError as error:
                for name in error.args[1][1:]:
                    self._join(error.args[1][0], name)
                continue
            return [units[u] for u in self._in_order(sorter, units)]

    def _in_order(
        self, sorter: TopologicalSorter[str], units: Mapping[str, Sequence[str]]
    ) -> Iterable[str]:
        """The units in an order near the graph's own: each stands where its last node did."""
        heap: list[tuple[int, str]] = []
        while sorter.is_active():
            for unit in sorter.get_ready():
                heappush(heap, (max(map(self.place.__getitem__, units[unit])), unit))
            _, unit = heappop(heap)
            sorter.done(unit)
            yield unit

    # Nodes

    def _node(self, members: Sequence[str], wanted: Set[Ref]) -> tuple[Node, Call, Sequence[Ref]]:
        """The node of a region, what runs it, and the values that it gives; others are `wanted`."""
        whole = self._copied(members)
        nodes = [self.nodes[n] for n in whole]
        drawn = [n for n in nodes if n.op in KEY_POSITION]
        if drawn:
            raise RecordError(
                f"{drawn[0].source}: random numbers in a part of the forward whose shapes depend "
                "on the data, which would differ with the layout; draw for all, and select then"
            )
        own = set(whole)
        skips = {n: self.skips[n] for n in whole if n in self.skips}
        masks = [skip.mask for skip in skips.values()]
        read = dict.fromkeys(r for n in nodes for r in self._reads(n) if r.node not in own)
        read |= dict.fromkeys(mask for mask in masks if mask.node not in own)
        outputs = [
            Ref(n, k)
            for n in members
            for k, spec in enumerate(self.nodes[n].outputs)
            if spec is not None and Ref(n, k) in wanted and not self._has_values(Ref(n, k))
        ]
        region = Region(nodes, list(read), outputs, self.sources, self.graph.functions, skips)
        specs: list[Spec] = [(self.specs[r].shape, self.specs[r].dtype) for r in outputs]
        first = next(n for n in nodes if n.name in self.dynamic)
        last = self.nodes[members[-1]]
        self.number += 1
        about = last.module, first.source, WHY, self._flops(nodes), self.number, region.digest
        call = Call(region, tuple(specs), *about)
        args = (tuple(read), (), enter(call))
        made = Node(f"region_{self.number}", OPAQUE, args, (),
                    tuple(self.specs[r] for r in outputs), module=last.module,
                    source=first.source)  # fmt: skip
        return made, call, outputs

    def _flops(self, nodes: Sequence[Node]) -> int:
        """What a region computes at most: no size is larger than all that it is taken from."""
        bounds: dict[str, int] = defaultdict(lambda: 1)
        for symbol, (ref, dim) in self.sources.items():
            if dim is not None and ref.node in self.nodes:
                read = [self.specs[r] for r in self.nodes[ref.node].refs if r in self.specs]
                places = [s for s in read if not s.dtype.is_floating_point] or read
                sizes = [prod(d for d in s.shape if isinstance(d, int)) for s in places]
                bounds[symbol] = max(sizes, default=1)

        def bounded(spec: TensorSpec | None) -> TensorSpec | None:
            if spec is None:
                return None
            sizes: tuple[Any, ...] = spec.shape
            shape = [d.value(bounds) if isinstance(d, Number) else d for d in sizes]
            return spec._replace(shape=tuple(map(int, shape)))

        specs = {r: bounded(self.specs[r]) for n in nodes for r in n.refs if r in self.specs}
        total = 0
        for node in nodes:
            if node.op != ITEM:
                outputs = tuple(map(bounded, node.outputs))
                total += node_flops(replace(node, outputs=outputs), specs)  # type: ignore[arg-type]
        return total
