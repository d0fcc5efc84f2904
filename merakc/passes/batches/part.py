"""The graph of a part, written from its recording and what was found of it."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from merakc.ir.graph import (
    Graph,
    Input,
    InputKind,
    Node,
    Output,
    OutputKind,
    Ref,
    TensorSpec,
    map_refs,
)
from merakc.kernels.draws import KEY_POSITION
from merakc.passes.batches.analyse import Analysis
from merakc.passes.batches.linear import ADDED, CHOOSING
from merakc.passes.batches.own_rules import BATCH_NORM
from merakc.passes.batches.reader import number_places, with_defaults
from merakc.passes.batches.states import SAMPLES, Kind

MUL, CAST, COUNTED = "aten.mul.Tensor", "aten.to.dtype", "merakc.counted.default"
SUMMED = ("aten.add.Tensor", "aten.sub.Tensor")  # of the terms of a loss


def known_name(ref: Ref) -> str:
    """The name under which a value of the batch alone enters the step."""
    return f"known.{ref.node}" if ref.index == 0 else f"known.{ref.node}.{ref.index}"


def share_name(ref: Ref) -> str:
    """The name under which a part hands a value over."""
    return f"share.{ref.node}" if ref.index == 0 else f"share.{ref.node}.{ref.index}"


class PartWriter:
    """Writes the graph of a part.

    `before` says that it is what runs before the step, whose sums of the batch alone are what it
    gives; in the step they are known, and `known` has those that it reads. What is `alone` takes
    the part for a batch of its own, by convention: it is computed as it was recorded.
    """

    def __init__(self, found: Analysis, *, before: bool = False) -> None:
        self.found, self.before = found, before
        self.known: dict[Ref, None] = {}
        self.nodes: list[Node] = []
        self.names: dict[Ref, Ref] = {}
        self.shared: set[str] = set()
        # Batch norms, whose statistics are of each part by convention.
        self.norms = {n.module for n in found.part.nodes if n.op == BATCH_NORM}
        self.counting: set[str] = set()  # the nodes that count the places of a part's own samples

    def written(self, outputs: Sequence[Output], alone: Collection[Output] = ()) -> Graph:
        """The graph with these outputs, at the refs of the recording; some of them `alone`."""
        part = self.found.part
        specs = part.specs()
        exact = [o.ref for o in outputs if o not in alone]
        own = [o.ref for o in alone if o.kind is not OutputKind.LOSS]
        for out in alone:
            if out.kind is OutputKind.LOSS:
                for term in loss_terms(self.found, out.ref):
                    coupled = self.found.states[term].kind is Kind.COUPLED
                    (own if coupled else exact).append(term)
        needed = self._needed(exact)
        recorded = self._behind(own)
        differing = self._differing() if own else set()
        inputs = list(part.inputs)
        for ref in self.known:
            name = known_name(ref)
            self.names[ref] = Ref(name)
            inputs.append(Input(name, InputKind.BATCH, specs[ref], name))
        for node in part.nodes:
            if node.name in needed:
                self._write(node)
            if node.name in recorded and (node.name in differing or node.name not in needed):
                self._write_alone(node, differing)
        now = tuple(o.at(self._leaving(o, o in alone, differing)) for o in outputs)
        graph = Graph(tuple(inputs), tuple(self.nodes), now, part.constants, part.functions)
        return graph.pruned().without_unread_inputs()

    def _leaving(self, out: Output, alone: bool, differing: Collection[str]) -> Ref:
        """The value of an output; of a loss that is no sum over samples, the part's share."""
        if out.kind is OutputKind.LOSS:
            return self._term(out.ref, differing)
        if not alone:
            return self.names.get(out.ref, out.ref)
        ref = _alone(out.ref, differing)
        spec = self.found.part.specs()[out.ref]
        averaged = out.kind is OutputKind.RESULT and spec.dtype.is_floating_point
        if averaged and self.found.shown(out.ref).rows is None:
            return self._shared(self.found.makers[out.ref.node], ref, spec, f"{ref.node}.share")
        return ref

    # ------------------------------------------------------------------ a part by itself

    def _term(self, ref: Ref, differing: Collection[str]) -> Ref:
        """A part's share of a term of the loss."""
        state, node = self.found.states[ref], self.found.makers.get(ref.node)
        if state.kind is Kind.SUM and not state.known:
            return self.names.get(ref, ref)
        now, spec = self.names.get(ref, ref), self.found.part.specs()[ref]
        if state.kind is Kind.COUPLED:
            assert node is not None, "an input that couples"
            if node.op in SUMMED and not node.kwargs:
                args = tuple(
                    self._term(a, differing) if isinstance(a, Ref) else a * self.found.share
                    for a in node.args
                )
                self.nodes.append(replace(node, name=f"{node.name}.terms", args=args))
                return Ref(f"{node.name}.terms", ref.index)
            now = _alone(ref, differing)
        where = node or Node("", "", (), (), ())
        return self._shared(where, now, spec, f"{now.node}.{now.index}.share")

    def _behind(self, refs: Iterable[Ref]) -> set[str]:
        """All nodes that these values are computed from."""
        found: set[str] = set()
        waiting = list(refs)
        while waiting:
            node = self.found.makers.get(waiting.pop().node)
            if node is not None and node.name not in found:
                found.add(node.name)
                waiting += node.refs
        return found

    def _differing(self) -> set[str]:
        """The nodes of which a part computes something else than it would as a batch of its own."""
        found: set[str] = set()
        for node in self.found.part.nodes:
            outcome, twin = self.found.outcomes[node.name], self.found.twins[node.name]
            states = [self.found.states[r] for r in (*node.refs, *node.made)]
            known = any(s.whole or (s.known and s.kind is Kind.SUM) for s in states)
            changed = outcome.scaled or outcome.once or outcome.places is not None
            other = with_numbers(node, node.args, twin) != node.args
            if known or changed or other or not found.isdisjoint(r.node for r in node.refs):
                found.add(node.name)
        return found

    def _write_alone(self, node: Node, differing: Collection[str]) -> None:
        """Writes a node as it was recorded."""
        if node.op in KEY_POSITION:
            coupled = self.found.states[Ref(node.name)].kind is Kind.COUPLED
            node = keyed(self.found, node, self.found.samples, together=coupled)

        def now(ref: Ref) -> Ref:
            return _alone(ref, differing)

        kwargs = map_refs(node.kwargs, now)
        name = _alone(Ref(node.name), differing).node
        self.nodes.append(replace(node, name=name, args=map_refs(node.args, now), kwargs=kwargs))

    # ------------------------------------------------------------------ what a part computes

    def _needed(self, refs: Iterable[Ref]) -> set[str]:
        """The nodes that a part runs; what it cannot compute itself goes to `known`."""
        states, makers = self.found.states, self.found.makers
        needed: set[str] = set()
        waiting = list(refs)
        while waiting:
            ref = waiting.pop()
            state = states[ref]
            if state.whole or (state.known and state.kind is Kind.SUM and not self.before):
                self.known[ref] = None
                continue
            node = makers.get(ref.node)
            if node is None or node.name in needed:
                continue
            coupled = state.kind is Kind.COUPLED and node.module not in self.norms
            assert not coupled, f"a part needs {ref}, which is coupled"
            needed.add(node.name)
            places = self._places(node)
            waiting += [r for r in node.refs if r != places]
            if places is not None:
                self._count(places)
        return needed | self.counting

    def _places(self, node: Node) -> Ref | None:
        at = self.found.outcomes[node.name].places
        return None if at is None else node.refs[at]

    def _count(self, ref: Ref) -> None:
        node = self.found.makers[ref.node]
        self.counting.add(node.name)
        for r in node.refs:
            self._count(r)

    # ------------------------------------------------------------------ one node

    def _write(self, node: Node) -> None:
        if node.name in self.counting:
            self.nodes.append(node)
            return
        outcome, twin = self.found.outcomes[node.name], self.found.twins[node.name]
        args = keyed(self.found, node, self.found.samples).args
        places = self._places(node)
        args = with_numbers(node, args, twin)
        if args is not node.args:
            node = node.reading(args)
        if outcome.once:
            node = self._once(node)

        if outcome.filled:
            node = self._filled(node)

        def now(ref: Ref) -> Ref:
            return ref if ref == places else self.names.get(ref, ref)

        if not self.names.keys().isdisjoint(node.refs):
            node = node.reading(map_refs(node.args, now), map_refs(node.kwargs, now))
        self.nodes.append(node)
        for k, spec in enumerate(node.outputs if outcome.scaled else ()):
            if spec is not None and (spec.dtype.is_floating_point or spec.dtype.is_complex):
                ref = Ref(node.name, k)
                self.names[ref] = self._shared(node, ref, spec, f"{node.name}.share.{k}")

    def _filled(self, node: Node) -> Node:
        """The node with its mask checked to be true at as many places as there are values."""
        values, mask, source = node.refs
        specs, name = self.found.part.specs(), f"{node.name}.counted"
        count = specs[source].numel * specs[mask].numel // specs[values].numel
        args = (self.names.get(mask, mask), count, node.source)
        where = (node.module, node.source, False)
        self.nodes.append(Node(name, COUNTED, args, (), (specs[mask],), *where))
        return replace(node, args=(values, Ref(name), source))

    def _once(self, node: Node) -> Node:
        """The node with its part's share of those arguments that count once in all parts."""
        states, specs = self.found.states, self.found.part.specs()

        def counts_once(ref: Ref) -> bool:
            state = states[ref]
            adds = state.kind is Kind.SUM and not (state.known and not self.before)
            return not adds and not state.sampled

        def now(ref: Ref) -> Ref:
            if not counts_once(ref):
                return ref
            name = f"{node.name}.once.{ref.node}.{ref.index}"
            spec = TensorSpec(specs[ref].shape, node.spec.dtype)
            return self._shared(node, self.names.get(ref, ref), spec, name, specs[ref].dtype)

        args = [v if CHOOSING.get(node.op) == k else map_refs(v, now)
                for k, v in enumerate(node.args)]  # fmt: skip
        for k, value in enumerate(args[:2] if node.op in ADDED else ()):
            if isinstance(value, (int, float, complex)):
                args[k] = value * self.found.share
        return replace(node, args=tuple(args))

    def _shared(
        self, node: Node, ref: Ref, spec: TensorSpec, name: str, dtype: torch.dtype | None = None
    ) -> Ref:
        """The part's share of a value, written behind `node` under `name`."""
        if name in self.shared:
            return Ref(name)
        self.shared.add(name)

        def add(name: str, op: str, args: tuple[Any, ...]) -> Ref:
            where = (node.module, node.source, node.grad)
            self.nodes.append(Node(name, op, args, (), (spec,), *where))
            return Ref(name)

        if dtype is not None and dtype != spec.dtype:
            ref = add(f"{name}.cast", CAST, (ref, spec.dtype))
        return add(name, MUL, (ref, self.found.share))


def loss_terms(found: Analysis, ref: Ref) -> list[Ref]:
    """The terms of a loss that couples, of which some may be exact all the same; or itself."""
    node = found.makers.get(ref.node)
    if found.states[ref].kind is not Kind.COUPLED or node is None:
        return [ref]
    if node.op not in SUMMED or node.kwargs:
        return [ref]
    return [term for r in node.refs for term in loss_terms(found, r)]


def with_numbers(node: Node, args: tuple[Any, ...], twin: Node) -> tuple[Any, ...]:
    """The arguments of a part's node, with the whole batch's numbers in the place of its own."""
    if node.args == twin.args:
        return args
    numbers, pairs = number_places(node), zip(*with_defaults(node, args, twin.args), strict=True)
    return tuple(
        other if k in numbers and not isinstance(other, Ref) else mine
        for k, (mine, other) in enumerate(pairs)
    )


def _alone(ref: Ref, differing: Collection[str]) -> Ref:
    """The value that a part computes as a batch of its own."""
    return Ref(f"{ref.node}.alone", ref.index) if ref.node in differing else ref


def keyed(found: Analysis, node: Node, samples: int, *, together: bool = False) -> Node:
    """A draw keyed by the samples that were found in it, of which it holds so many; or `together`,
    by the first of them.
    """
    if node.op not in KEY_POSITION:
        return node
    state = found.states[Ref(node.name)]
    at = KEY_POSITION[node.op] + 1
    sample: int = -1
    sizes: tuple[int, ...] = (node.spec.numel,)
    if state.kind is Kind.ROWS and state.dims is not None:
        factors = [f for dim in state.dims for f in dim]
        k = factors.index(SAMPLES)
        before = math.prod(int(f) for f in factors[:k])
        after = math.prod(int(f) for f in factors[k + 1 :])
        sample, sizes = (1, (before, samples, after)) if before > 1 else (0, (samples, after))
    if together:
        sample, sizes = 0, (1, node.spec.numel)
    starts = (0,) * len(sizes)
    return replace(node, args=(*node.args[:at], sample, sizes, starts, sizes, *node.args[at + 4 :]))


def with_keys(graph: Graph, found: Analysis, samples: int) -> Graph:
    """The graph of a part of so many samples with its draws keyed."""
    if not any(n.op in KEY_POSITION for n in graph.nodes):
        return graph
    return replace(graph, nodes=tuple(keyed(found, n, samples) for n in graph.nodes))
