"""Exchange of heads: attentions on a cut sequence that have all of it, of a part of the heads.

Where keys and values are gathered, every rank holds them whole, and under a causal mask the ranks
of later rows do more. Where blocks of a sequence are exchanged for heads before an attention, and
back behind it (DeepSpeed-Ulysses, arXiv 2309.14509), each rank attends to the whole sequence with
its heads: of n ranks each sends 1/n of what it would gather, of queries and results too.

Heads are found, not named: a dim of the result of a call that reads something whole, which no rule
needs whole. Which calls have parts of it is a minimum cut for each such dim, between those and the
calls on parts of the sequence: so an attention is exchanged as one call or spelled out in products,
with the views and masks around it where these are cheaper to send. Of grouped heads that are fewer
than ranks the queries of each group are exchanged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Protocol

from merakc.analysis.minimum_cut import MinimumCut
from merakc.costs.device import place_on
from merakc.costs.fabric import all_gather_seconds
from merakc.costs.nodes import divided_seconds
from merakc.errors import ShardError
from merakc.ir.graph import Graph, InputKind, Node, Ref, TensorSpec
from merakc.ir.layout import DimFactor, Layout
from merakc.kernels.draws import KEY_POSITION
from merakc.passes.sharding.choose import PASSES
from merakc.passes.sharding.dims import Dims
from merakc.passes.sharding.draw_blocks import draw_blocks
from merakc.passes.sharding.experts.blocks import Experts
from merakc.passes.sharding.factors import Factor, leaves
from merakc.passes.sharding.layouts import SequenceSplit, Sharding
from merakc.passes.sharding.separate_heads import HEADS_DIM
from merakc.passes.sharding.sequences.exchange import before_repeats
from merakc.passes.sharding.sequences.gradient_sums import gradient_sums
from merakc.passes.sharding.sequences.sequence import FIGURES
from merakc.passes.sharding.spmd_ops import ATTENTION

# What bytes that are exchanged count, beside those that are gathered: a little more, since of forms
# that move as much the one with fewer collectives is better. Tests have other figures.
EXCHANGE_PRICE = 1.02


class Reads(Protocol):
    """How a node on parts reads: what it needs whole; whether its result is a sum of the parts'."""

    @property
    def whole(self) -> frozenset[Ref]:
        """The arguments that it needs whole."""

    @property
    def is_sum(self) -> bool:
        """Whether ranks' results add up."""


class Parts(Protocol):
    """Which nodes of a graph may compute on parts of a dim, and how
    (`merakc.passes.sharding.sequences.context.ContextProblem`).
    """

    dims: Dims
    graph: Graph
    sharding: Sharding
    specs: Mapping[Ref, TensorSpec]
    grads: frozenset[Ref]
    parameters: set[Ref]
    nodes: dict[str, Node]
    experts: tuple[Experts, ...]

    def place(self, ref: Ref, factor: Factor) -> tuple[int, int] | None:
        """The dim of a value that has the factor, and the size of what is outside of it there."""

    def reads(self, node: Node, factor: Factor) -> Reads | None:
        """How the node reads where it computes on parts; None where it cannot."""

    def layout_of(self, ref: Ref, factor: Factor) -> Layout:
        """The layout of a value on parts."""


def exchange_heads(
    problem: Parts,
    sequences: Mapping[Factor, SequenceSplit],
    sums: Collection[str],
    tp: int,
) -> tuple[SequenceSplit, ...]:
    """The sequences, each of one dim, with splits of heads beside them, for calls that are cheaper
    so. The nodes `sums` give parts of sums. Each of `tp` ranks inside those of cp may have a block
    of the heads: ranks of cp share the heads of each.
    """
    heads = _Heads(problem, sequences, sums, tp)
    found = list[SequenceSplit]()
    for factor in heads.candidates():
        nodes = heads.solve(factor)
        if nodes:
            heads.taken |= nodes
            found.append(heads.split(factor, nodes))
    if not found:
        return tuple(sequences.values())
    return (*(_without(own, heads.taken) for own in sequences.values()), *found)


def _without(split: SequenceSplit, gone: Collection[str]) -> SequenceSplit:
    return replace(
        split,
        nodes=split.nodes.difference(gone),
        kept=frozenset(ref for ref in split.kept if ref.node not in gone),
        whole=frozenset(pair for pair in split.whole if pair[0] not in gone),
    )


class _Heads:
    """Which calls of a graph on parts of sequences have parts of heads instead."""

    def __init__(
        self,
        problem: Parts,
        sequences: Mapping[Factor, SequenceSplit],
        sums: Collection[str],
        tp: int,
    ) -> None:
        self.problem, self.tp, self.ranks = problem, tp, problem.sharding.tp
        self.machine = place_on(FIGURES, self.ranks)
        self.sequences = sequences
        splits = sequences.values()
        self.home = {name: split for split in splits for name in split.nodes}
        self.kept = frozenset[Ref]().union(*(split.kept for split in splits))
        self.sums = gradient_sums(problem.graph, splits)
        self.taken = frozenset[str]()
        self.barred = frozenset(sums).union(*(block.nodes for block in problem.experts))
        self.barred |= frozenset(name for split in splits for name in split.rings)
        self.readers = Counter(ref for node in problem.graph.nodes for ref in node.refs)
        self.needs = {
            node.name: [r for r in dict.fromkeys(node.refs) if (node.name, r) in home.whole]
            for node in problem.graph.nodes
            if (home := self.home.get(node.name)) is not None
        }
        self.touching: dict[Factor, list[Node]] = {}

    def candidates(self) -> list[Factor]:
        """The dims that could be heads, in the order of the graph."""
        dims, graph = self.problem.dims, self.problem.graph
        samples = {
            factor
            for item in graph.inputs
            if item.kind is InputKind.BATCH and dims.of[Ref(item.name)]
            for factor in leaves(dims.of[Ref(item.name)][0])
        }
        reading = [n for n in graph.nodes if self.problem.grads & {*self.needs.get(n.name, ())}]
        found = dict.fromkeys(f for n in reading for f in self._factors(Ref(n.name)))
        barred = samples | self.sequences.keys()
        fits = [f for f in found if f not in barred and not f.blocked and self._fits(f.size)]
        self.touching = {factor: [] for factor in fits}
        for node in graph.nodes:
            refs = dict.fromkeys((*node.refs, *node.made))
            for factor in dict.fromkeys(f for ref in refs for f in self._factors(ref)):
                if factor in self.touching:
                    self.touching[factor].append(node)
        return fits

    def _factors(self, ref: Ref) -> list[Factor]:
        return [factor for dim in self.problem.dims.of[ref] for factor in leaves(dim)]

    def _fits(self, size: int) -> bool:
        """Whether every rank of cp has some, and as many of each tp rank's."""
        return size >= self.ranks if self.tp == 1 else size % (self.tp * self.ranks) == 0

    def _may_move(self, node: Node, factor: Factor) -> bool:
        """Whether the node gives its part of heads from parts of arguments, parameters aside."""
        home, problem = self.home.get(node.name), self.problem
        if home is None or node.name in self.taken or node.name in home.counting:
            return False
        if node.name in self.barred:
            return False
        reads = problem.reads(node, factor)
        if reads is None or reads.is_sum or reads.whole:
            return False
        place = problem.place(Ref(node.name), factor)
        if node.op == ATTENTION and (place is None or place[0] != HEADS_DIM):
            return False
        has = [ref for ref in node.refs if problem.place(ref, factor) is not None]
        return problem.parameters.isdisjoint(has) and self._draws_apart(node, factor)

    def _draws_apart(self, node: Node, factor: Factor) -> bool:
        if node.op not in KEY_POSITION:
            return True
        try:
            for rank in range(self.ranks):
                draw_blocks(node, self.layout(Ref(node.name), factor), self.ranks, rank)
        except (AssertionError, ShardError):  # no block of the array by which it is keyed
            return False
        return True

    def layout(self, ref: Ref, factor: Factor) -> Layout:
        """The layout of a value of which ranks have parts of heads."""
        own = self.problem.layout_of(ref, factor)
        inside = (DimFactor(self.tp), DimFactor(factor.size // self.tp, True))

        def opened(part: DimFactor) -> tuple[DimFactor, ...]:
            return inside if part.split and self.tp > 1 else (part,)

        return Layout(tuple(tuple(f for p in dim for f in opened(p)) for dim in own.dims))

    def solve(self, factor: Factor) -> frozenset[str]:
        """The nodes that cost least on parts of heads; none where nothing is gained."""
        nodes = self.touching[factor]
        movable = {n.name for n in nodes if self._may_move(n, factor)}
        cut = MinimumCut()
        for node in nodes:
            if node.name in movable:
                self._add_work(cut, node, factor)
            self._add_reads(cut, node, factor, movable)
        inside = movable & cut.source_side()[0] if cut.edges else set()
        # Views alone gain nothing.
        gains = any(self.needs[name] for name in inside)
        return frozenset(inside) if gains else frozenset()

    def _add_work(self, cut: MinimumCut, node: Node, factor: Factor) -> None:
        """What the slowest rank takes longer than the mean: of causal rows, or of uneven heads."""
        specs, machine = self.problem.specs, self.machine
        work_s = divided_seconds(node, specs, machine)
        if node.op == ATTENTION:
            query = node.args[0]
            rows = self.home[node.name].layouts[query].local_shape(self.ranks, 0)
            part = {**specs, query: TensorSpec(rows, specs[query].dtype)}
            part_s = divided_seconds(node, part, machine)
            cut.add("source", node.name, PASSES * max(part_s - work_s / self.ranks, 0.0))
        most = -(-factor.size // self.ranks)
        uneven = most / factor.size - 1 / self.ranks
        if uneven > 0:
            cut.add(node.name, "sink", PASSES * uneven * work_s)

    def _add_reads(
        self, cut: MinimumCut, node: Node, factor: Factor, movable: Collection[str]
    ) -> None:
        """The cost of bringing the node's arguments to its side."""
        reader = node.name if node.name in movable else "sink"
        needed = self.needs.get(node.name)
        for ref in dict.fromkeys(node.refs):
            maker = ref.node if ref.node in movable else "sink"
            if ref in self.kept and (needed is None or ref in needed):
                cut.add(f"whole:{ref}", reader)
                cut.add("source", f"whole:{ref}", self._gather_s(self._before_repeats(ref)))
            if self.problem.place(ref, factor) is None:
                if reader != "sink":
                    cut.add(reader, f"enter:{ref}")
                    cut.add(f"enter:{ref}", "sink", self._entering_s(ref))
                continue
            sent_s = EXCHANGE_PRICE * self._gather_s(ref) / self.ranks
            if reader != "sink":
                cut.add(reader, f"in:{ref}")
                cut.add(f"in:{ref}", maker, sent_s if ref in self.kept else self._entering_s(ref))
            if maker != "sink" and needed is not None and ref not in needed:
                cut.add(maker, f"out:{ref}", sent_s)
                cut.add(f"out:{ref}", reader)

    def _entering_s(self, ref: Ref) -> float:
        """Seconds of a value whole on every rank: of one without a gradient, its readers share
        them.
        """
        if ref in self.sums or (ref not in self.kept and ref not in self.problem.grads):
            return 0.0
        every = 1 if ref in self.problem.grads else self.readers[ref]
        return self._gather_s(ref) / every

    def _gather_s(self, ref: Ref) -> float:
        """Seconds of a gather, and of the scatter of its gradient."""
        passes, size_bytes = 1 + (ref in self.problem.grads), self.problem.specs[ref].size_bytes
        group, fabric = self.machine.group("tp"), self.machine.fabric
        return passes * all_gather_seconds(size_bytes, group, fabric)

    def _before_repeats(self, ref: Ref) -> Ref:
        """What is gathered in a value's place."""
        source, _ = before_repeats(ref, self.problem.nodes)
        return source if source in self.kept else ref

    def split(self, factor: Factor, nodes: frozenset[str]) -> SequenceSplit:
        """The split of heads that these nodes run in."""
        own = [self.problem.nodes[name] for name in nodes]
        made = {o for n in own for o in n.made}
        read = {ref for n in own for ref in n.refs}
        layouts: Mapping[Ref, Layout] = {
            ref: self.layout(ref, factor)
            for ref in made | read
            if self.problem.place(ref, factor) is not None
        }
        kept = frozenset(made & layouts.keys())
        exchanged = frozenset(name for name in nodes if self.needs[name])
        return SequenceSplit(nodes, kept, layouts, exchanged=exchanged)
