"""Sequence parallelism: what tensor parallelism leaves whole runs on parts of a sequence.

Between the exit of one split region and the entry of the next (norms, dropout, residual sums),
every rank computes the same. Where a rank takes a part of the sequence there instead, the
all-reduce at the exit becomes a reduce-scatter, the entry an all-gather, which together move the
same bytes (Korthikanti et al., arXiv 2205.05198, section 4.2); work and activations divide by tp.

Any dim that the graph carries through will do. Which nodes go inside is a minimum cut, exact for
the costs below: a node pays for being outside with the work that all ranks repeat, a value for
crossing with its collectives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Set
from dataclasses import replace

from merakc.analysis.aliases import FREE
from merakc.analysis.minimum_cut import MinimumCut
from merakc.costs.device import place_on, traffic_seconds
from merakc.costs.fabric import all_gather_seconds
from merakc.costs.nodes import divided_seconds
from merakc.ir.graph import Graph, Input, InputKind, Node, Ref, map_refs
from merakc.ir.layout import Layout
from merakc.machines.cluster import NOMINAL_GPU
from merakc.passes.sharding.choose import PASSES, VOCABULARY_OPS
from merakc.passes.sharding.dims import Dims
from merakc.passes.sharding.factors import Dim, Factor, atoms, layout, leaves
from merakc.passes.sharding.layouts import SequenceSplit, Sharding
from merakc.passes.sharding.propagate import propagate

# Which nodes go inside follows from these figures on every cluster, so that a plan need only say
# whether sequences are split; whether that pays is for the search to find with the real ones.
# Without latencies a small model is split like the large one that it stands for.
FIGURES = replace(NOMINAL_GPU, link_latency_s=0.0)
MAX_DIMS = 4  # that are tried: sequence and hidden dim of an encoder and of a decoder


def split_sequences(dims: Dims, sharding: Sharding, chosen: set[Factor]) -> Sharding:
    """The sharding with sequences split between its regions of split dims, where that saves time.

    The same sharding where tp is 1 or no dim can be carried.
    """
    if sharding.tp == 1:
        return sharding
    problem = Problem(dims, sharding, chosen)
    found: list[SequenceSplit] = []
    alone = {factor: problem.solve(factor) for factor in problem.candidates()[:MAX_DIMS]}
    for factor in sorted(alone, key=lambda f: -alone[f][0]):
        # Of what the better ones have left.
        _, split = problem.solve(factor) if found else alone[factor]
        if split is not None:
            problem.taken |= split.nodes
            problem.kept |= split.kept
            found.append(split)
    return replace(sharding, sequences=tuple(found))


class Problem:
    """Which nodes of one graph may compute on parts, and what that costs."""

    def __init__(self, dims: Dims, sharding: Sharding, chosen: set[Factor]) -> None:
        self.dims, self.sharding, self.chosen = dims, sharding, chosen
        self.graph = dims.graph
        self.specs = self.graph.specs()
        self.machine = place_on(FIGURES, sharding.tp)
        self.grads = self.graph.grad_values()
        self.taken: frozenset[str] = frozenset()
        self.kept: frozenset[Ref] = frozenset()
        self.rules: dict[object, Dims] = {}
        self._split = {ref for ref, own in sharding.layouts.items() if own.is_split}
        self._rule_of: dict[str, Dims] = {}  # by the node's name
        self._free: dict[Factor, frozenset[str]] = {}
        self._places: dict[Ref, dict[Factor, tuple[int, int] | None]] = {}
        self._held: dict[Ref, frozenset[Factor]] = {}  # the factors of a value and their segments

    def is_exit(self, node: Node) -> bool:
        """Whether the node's result is an all-reduce that could be a reduce-scatter."""
        return (
            node.name in self.sharding.partial
            and node.op not in VOCABULARY_OPS
            and Ref(node.name) in self.grads
            and Ref(node.name) not in self.kept
        )

    def candidates(self) -> list[Factor]:
        """The dims of the results that are all-reduced, those that most bytes have first."""
        sizes: Counter[Factor] = Counter()
        for node in self.graph.nodes:
            if self.is_exit(node):
                for dim in reversed(self.dims.of[Ref(node.name)]):
                    for factor in leaves(dim):
                        whole = self.chosen.isdisjoint(atoms([factor]))
                        if whole and factor.size >= self.sharding.tp:
                            sizes[factor] += node.spec.size_bytes
        return [factor for factor, _ in sizes.most_common()]

    def place(self, ref: Ref, factor: Factor) -> tuple[int, int] | None:
        """The dim of a value that has the factor, and the size of what is outside of it there."""
        if ref not in self._places:
            self._places[ref] = self._find_places(ref)
        return self._places[ref].get(factor)

    def _find_places(self, ref: Ref) -> dict[Factor, tuple[int, int] | None]:
        """The place of each factor of a value; None where it has several."""
        found: dict[Factor, tuple[int, int] | None] = {}
        for k, dim in enumerate(self.dims.of[ref]):
            outer = 1
            for own in leaves(dim):
                found[own] = None if own in found else (k, outer)
                outer *= own.size
        return found

    def is_without(self, ref: Ref, factor: Factor) -> bool:
        """Whether the value has neither the factor nor segments of it."""
        parts = {factor, *atoms([factor])}
        if ref not in self._held:
            dims = self.dims.of[ref]
            self._held[ref] = frozenset(f for dim in dims for f in (*leaves(dim), *atoms(dim)))
        return self._held[ref].isdisjoint(parts)

    def splits(self, ref: Ref) -> bool:
        """Whether the value is split over tp."""
        return ref in self._split

    def may_be_inside(self, node: Node, factor: Factor) -> bool:
        """Whether the node gives its part of the result from parts of its arguments."""
        outs = [Ref(node.name, k) for k, o in enumerate(node.outputs) if o is not None]
        if node.name in self.taken or node.name in self.sharding.partial:
            return False
        if not any(o in self.grads for o in outs) or any(map(self.splits, (*node.refs, *outs))):
            return False
        rule = self.rule(node)
        summed = {f for dim in rule.summed.get("node", ()) for f in atoms(dim)}
        reached: set[Factor] = set()
        for ref, alias in zip(dict.fromkeys(node.refs), aliases_of(node).values(), strict=True):
            if self.is_without(ref, factor):
                continue
            own = self.covering(rule.of[alias], self.place(ref, factor), factor.size)
            if own is None or own.blocked or own.segments or own in summed:
                return False
            reached.add(own)
        ends = {
            self.covering(rule.of[Ref("node", o.index)], self.place(o, factor), factor.size)
            for o in outs
        }
        return bool(reached) and ends <= reached

    def covering(self, own: list[Dim], place: tuple[int, int] | None, size: int) -> Factor | None:
        """The factor of a rule that the place of a value's factor lies in."""
        if place is None:
            return None
        dim, start = place
        outer = 1
        for factor in leaves(own[dim]):
            if outer <= start and start * size <= outer * factor.size:
                return factor
            outer *= factor.size
        return None

    def rule(self, node: Node) -> Dims:
        """The dims of the node by itself: what it needs whole, and what it sums."""
        if node.name not in self._rule_of:
            self._rule_of[node.name] = self._rule(node)
        return self._rule_of[node.name]

    def _rule(self, node: Node) -> Dims:
        """The same answer, computed once for nodes that are alike."""
        aliases = aliases_of(node)
        alone = replace(
            node, name="node", module="", source="",
            args=map_refs(node.args, aliases.__getitem__),
            kwargs=map_refs(node.kwargs, aliases.__getitem__),
        )  # fmt: skip
        specs = [self.specs[ref] for ref in aliases]
        key = repr(alone), repr(specs)
        if key not in self.rules:
            inputs = tuple(
                Input(alias.node, InputKind.ACTIVATION, spec)
                for alias, spec in zip(aliases.values(), specs, strict=True)
            )
            self.rules[key] = propagate(Graph(inputs, (alone,), ()))
        return self.rules[key]

    def solve(self, factor: Factor) -> tuple[float, SequenceSplit | None]:
        """The cheapest set of nodes to run on parts of this factor's dim, and the seconds saved;
        None if that is none.
        """
        movable = self._movable(factor)
        exits = {
            n.name
            for n in self.graph.nodes
            if self.is_exit(n) and self.place(Ref(n.name), factor) is not None
        }
        open_nodes = movable | exits
        cut = MinimumCut()
        for node in self.graph.nodes:
            if node.name in open_nodes:
                self._add_node(cut, node, factor, movable)
        for node in self.graph.nodes:
            self._add_reads(cut, node, factor, movable, exits)
        inside, saved_s = cut.source_side()
        nodes = frozenset(movable & inside)
        if not nodes:
            return 0.0, None
        within = open_nodes & inside
        kept = {
            Ref(n.name, k)
            for n in self.graph.nodes
            if n.name in within
            for k, o in enumerate(n.outputs)
            if o is not None
        }
        return saved_s, SequenceSplit(nodes, frozenset(kept), self._layouts(nodes, kept, factor))

    def _movable(self, factor: Factor) -> frozenset[str]:
        """The nodes that may be inside, but for those that were taken since it was first asked."""
        if factor not in self._free:
            nodes = self.graph.nodes
            self._free[factor] = frozenset(n.name for n in nodes if self.may_be_inside(n, factor))
        return self._free[factor] - self.taken

    def _layouts(
        self, nodes: frozenset[str], kept: Iterable[Ref], factor: Factor
    ) -> Mapping[Ref, Layout]:
        # The bias of a sum is added to the parts.
        readers = nodes | {ref.node for ref in kept}
        read = {r for n in self.graph.nodes if n.name in readers for r in n.refs}
        return {
            ref: layout(self.dims.of[ref], self.dims.shapes[ref], {factor})
            for ref in {*read, *kept}
            if self.place(ref, factor) is not None
        }

    def _add_node(self, cut: MinimumCut, node: Node, factor: Factor, movable: Set[str]) -> None:
        """The cost of the node outside a split sequence: repeated work, or half an all-reduce."""
        made_bytes = sum(o.size_bytes for o in node.outputs if o is not None)
        if node.name in movable:
            # Once more for the activations that it leaves: as if they were written and read.
            work_s = divided_seconds(node, self.specs, self.machine)
            held_s = 0.0 if node.op in FREE else traffic_seconds(made_bytes, self.machine.device)
            repeated_s = PASSES * work_s + held_s
            cut.add("source", node.name, (1 - 1 / self.sharding.tp) * repeated_s)
        else:
            cut.add("source", node.name, self._gathered_s(made_bytes))

    def _add_reads(
        self, cut: MinimumCut, node: Node, factor: Factor, movable: Set[str], exits: Set[str]
    ) -> None:
        """The cost of moving the node's arguments to its side."""
        reader = node.name if node.name in movable else "sink"
        if reader == "sink" and not any(r.node in movable or r.node in exits for r in node.refs):
            return
        outs = [Ref(node.name, k) for k, o in enumerate(node.outputs) if o is not None]
        is_split = any(map(self.splits, (*node.refs, *outs)))
        for ref in dict.fromkeys(node.refs):
            made = ref.node if ref.node in movable or ref.node in exits else "sink"
            size_s = self._gathered_s(self.specs[ref].size_bytes)
            if made != "sink" and reader != made:
                # Gathered for split work it is what the all-reduce of its gradient would be.
                extra_s = 0.0 if is_split else size_s
                gathered = f"gather:{is_split}:{ref}"
                cut.add(made, gathered, extra_s)
                cut.add(gathered, reader)
            if reader != "sink" and ref in self.grads:
                has = self.place(ref, factor) is not None
                entered = f"enter:{ref}"
                cut.add(reader, entered)
                cut.add(entered, made, size_s * (1 if has else 2))

    def _gathered_s(self, size_bytes: int) -> float:
        """Seconds of half an all-reduce."""
        return all_gather_seconds(size_bytes, self.machine.group("tp"), self.machine.fabric)


def aliases_of(node: Node) -> dict[Ref, Ref]:
    """The node's arguments, each under a name that says only which one it is."""
    return {ref: Ref(f"x{k}") for k, ref in enumerate(dict.fromkeys(node.refs))}
