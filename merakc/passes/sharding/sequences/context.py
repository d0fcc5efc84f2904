"""Context parallelism: ranks that hold a model whole compute on parts of its sequences.

A dim of the activations that the graph carries from its inputs to its losses is cut over the ranks;
where they share experts and have samples to share, that of the samples.
What needs it whole is gathered: an attention its keys and values, of which each rank then attends
its own queries to all (as in Llama 3's training, arXiv 2407.21783, section 3.3.2). What a rank
makes of its part alone and what is a sum over the dim costs no more than the sum. All else is
computed whole on every rank, from gathered values: dear, and right.

Which nodes compute on parts is a minimum cut, as in `merakc.passes.sharding.sequences.sequence`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property

from merakc.analysis.aliases import is_view
from merakc.analysis.minimum_cut import MinimumCut
from merakc.costs.device import place_on
from merakc.costs.nodes import divided_seconds
from merakc.errors import ShardError
from merakc.ir.graph import InputKind, Node, Ref
from merakc.ir.layout import DimFactor, Layout
from merakc.kernels.draws import KEY_POSITION
from merakc.machines.cluster import Cluster
from merakc.passes.sharding.choose import AT_ANY_PRICE, LIKE_LARGE, PASSES
from merakc.passes.sharding.dims import Dims
from merakc.passes.sharding.draw_blocks import draw_blocks
from merakc.passes.sharding.experts.blocks import Experts, find_experts
from merakc.passes.sharding.experts.dispatch import with_experts
from merakc.passes.sharding.experts.ends import GROUPED
from merakc.passes.sharding.factors import Factor, atoms, leaves, size
from merakc.passes.sharding.gather_products import COLUMNS
from merakc.passes.sharding.layouts import SequenceSplit, Sharding
from merakc.passes.sharding.sequences.gradient_sums import gradient_sums
from merakc.passes.sharding.sequences.heads import exchange_heads
from merakc.passes.sharding.sequences.rings import with_rings
from merakc.passes.sharding.sequences.sequence import MAX_DIMS, Problem, aliases_of
from merakc.passes.sharding.spmd_ops import ATTENTION, SPECIAL

ROWS_DIM = 2  # of queries


@dataclass(frozen=True, slots=True)
class SequenceCut:
    """The sequences of a graph that are cut over ranks, each of one dim, and the nodes that then
    give parts of sums.
    """

    problem: ContextProblem
    splits: Mapping[Factor, SequenceSplit]
    sums: frozenset[str]


def cut_sequences(dims: Dims, sharding: Sharding, *, sends: bool) -> SequenceCut:
    """The sequences of a graph of which nothing is split, cut over the ranks of the sharding, which
    send rows to experts on each other where it `sends`: then the samples are, where these divide.

    Of models as small as in tests it asks what a large one would do, and, where that splits
    nothing, what would be split if sending cost nothing. Raises `ShardError` where no dim of the
    activations can be split.
    """
    for prices in (LIKE_LARGE, AT_ANY_PRICE):
        problem = ContextProblem(dims, sharding, prices, sends=sends)
        if found := problem.sample_splits() or problem.sequence_splits():
            sums = (n for factor, s in found.items() for n in s.nodes if problem.is_sum(n, factor))
            return SequenceCut(problem, found, frozenset(sums))
    raise ShardError(
        f"cp={sharding.tp}: no dim of {sharding.tp} or more elements of activations, beside "
        "those of samples and of weights, runs through the graph, so that no sequence can be "
        "split; use cp=1"
    )


def split_context(
    cut: SequenceCut, expert_load: Sequence[float] | None = None, *, tp: int = 1
) -> Sharding:
    """The sharding of a graph of which nothing but its sequences is split, for each of `tp` ranks;
    with an `expert_load`, of which none is even, experts are too, each with its weights on one of
    the ranks. Of weights that all ranks have they leave their parts of gradients to be added up
    with those of dp. Raises `ShardError` where no experts are found on what is cut.
    """
    problem = cut.problem
    passed = with_rings(problem, cut.splits, tp)
    splits = exchange_heads(problem, passed, cut.sums, tp)
    whole = problem.sharding
    sharding = replace(whole, sequences=splits, partial=whole.partial | cut.sums)
    if expert_load is not None:
        sharding = with_experts(problem, sharding, expert_load, tp)
    apart = {ref for ref, lay in sharding.layouts.items() if lay.is_split}
    return replace(sharding, sums=gradient_sums(problem.graph, splits, apart))


@dataclass(frozen=True, slots=True)
class _Reads:
    """How a node on parts reads: the arguments that it needs whole; whether its result is a sum of
    the parts'.
    """

    whole: frozenset[Ref]
    is_sum: bool


class ContextProblem(Problem):
    """Which nodes of one graph may compute on parts of a sequence, and what that costs."""

    def __init__(
        self, dims: Dims, sharding: Sharding, prices: Cluster, *, sends: bool = False
    ) -> None:
        super().__init__(dims, sharding, set())
        self.machine = place_on(prices, sharding.tp)
        inputs = self.graph.inputs
        self.parameters = {Ref(i.name) for i in inputs if i.kind is InputKind.PARAMETER}
        for node in self.graph.nodes:  # and views of them
            if node.refs and is_view(node) and self.parameters.issuperset(node.refs):
                self.parameters.update(node.outs)
        self.nodes = {n.name: n for n in self.graph.nodes}
        self._reads: dict[tuple[str, int], _Reads | None] = {}
        self.experts, self.sends = find_experts(dims, self.rule), sends
        self._block_of = {name: block for block in self.experts for name in block.nodes}

    def sequence_splits(self) -> dict[Factor, SequenceSplit]:
        """What is split along dims of the activations, each node along one."""
        found: dict[Factor, SequenceSplit] = {}
        for factor in self.candidates()[:MAX_DIMS]:
            _, split = self.solve(factor)
            if split is not None:
                self.taken |= split.nodes
                found[factor] = split
        return found

    def sample_splits(self) -> dict[Factor, SequenceSplit]:
        """What is split along the samples, if these divide over ranks that share experts, and all
        experts are among it: nothing is gathered for an attention then.
        """
        every = {n.name for n in self.graph.nodes if n.op == GROUPED}
        for factor in self.sizes if self.sends else ():
            if factor in self.samples and factor.size % self.sharding.tp == 0:
                _, split = self.solve(factor)
                if split is not None and every <= split.nodes:
                    return {factor: split}
        return {}

    @cached_property
    def samples(self) -> Set[Factor]:
        """What divides the samples of a batch."""
        found = set[Factor]()
        for item in self.graph.inputs:
            own = self.dims.of[Ref(item.name)]
            if item.kind is InputKind.BATCH and own:
                found.update(leaves(own[0]), atoms(own[0]))
        return found

    @cached_property
    def sizes(self) -> list[Factor]:
        """The dims of trained values, those that most bytes have first."""
        sizes: Counter[Factor] = Counter()
        for ref, spec in self.specs.items():  # in order: of equals the first counts on every rank
            if ref in self.grads and ref not in self.parameters:
                for factor in dict.fromkeys(f for dim in self.dims.of[ref] for f in leaves(dim)):
                    if factor.size >= self.sharding.tp:
                        sizes[factor] += spec.size_bytes
        return [factor for factor, _ in sizes.most_common()]

    def candidates(self) -> list[Factor]:
        """The same but for the samples of a batch and for what weights have."""
        barred = set(self.samples)
        for node in self.graph.nodes:
            for ref in node.refs if node.op in COLUMNS else ():
                if ref in self.parameters:
                    barred.update(f for dim in self.dims.of[ref] for f in leaves(dim))
        return [factor for factor in self.sizes if factor not in barred]

    def place(self, ref: Ref, factor: Factor) -> tuple[int, int] | None:
        """The first dim of a value that has the factor, and the size of what is outside of it: of
        scores the dim of queries, which stands before that of keys.
        """
        for k, dim in enumerate(self.dims.of[ref]):
            outer = 1
            for own in leaves(dim):
                if own is factor:
                    return k, outer
                outer *= own.size
        return None

    def is_sum(self, name: str, factor: Factor) -> bool:
        """Whether a node on parts gives a part of a sum."""
        reads = self.reads(self.nodes[name], factor)
        return reads is not None and reads.is_sum

    def may_be_inside(self, node: Node, factor: Factor) -> bool:
        """Whether the node gives its part of the result, or of a sum, from parts of arguments."""
        return node.name not in self.taken and self.reads(node, factor) is not None

    def reads(self, node: Node, factor: Factor) -> _Reads | None:
        """How the node reads where it computes on parts; None where it cannot."""
        key = node.name, id(factor)
        if key not in self._reads:
            self._reads[key] = self._find_reads(node, factor)
        return self._reads[key]

    def _find_reads(self, node: Node, factor: Factor) -> _Reads | None:
        if block := self._block_of.get(node.name):
            return _Reads(frozenset(), is_sum=False) if self._divides(block, factor) else None
        outs = [Ref(node.name, k) for k, o in enumerate(node.outputs) if o is not None]
        if not any(o in self.grads for o in outs) and not self._follows(node, factor):
            return None
        rule = self.rule(node)
        summed = {f for dim in rule.summed.get("node", ()) for f in atoms(dim)}
        places = [self.place(o, factor) for o in outs]
        is_sum = all(p is None for p in places)
        if not is_sum:
            made = [Ref("node", o.index) for o in outs]
            ends = {
                self.covering(rule.of[o], p, factor.size) for o, p in zip(made, places, strict=True)
            }
            (end,) = ends if len(ends) == 1 else (None,)
            if end is None or end in summed:
                return None
            # Of one value, two dims of the result: a rank has the part of one, all of the other.
            if any([f for dim in rule.of[o] for f in leaves(dim)].count(end) > 1 for o in made):
                return None
        parts: set[Factor] = set()
        whole: set[Ref] = set()
        for ref, alias in aliases_of(node).items():
            place = self.place(ref, factor)
            if place is None:
                if not self.is_without(ref, factor):
                    return None
                continue
            own = self.covering(rule.of[alias], place, factor.size)
            if own is not None and own in (summed if is_sum else ends):
                parts.add(own)
            else:
                whole.add(ref)
        if len(parts) != 1:
            return None
        (part,) = parts
        if part.blocked or part.segments or not self._is_computed(node, factor, whole):
            return None
        for ref, alias in aliases_of(node).items():
            # Of what is read whole no dim is that of the parts, nor of what has no such parts: what
            # divides into others (12 = 3 x 4, and 6 x 2) does not have them.
            is_part = self.place(ref, factor) is not None and ref not in whole
            if not is_part and any(part in leaves(dim) for dim in rule.of[alias]):
                return None
        return _Reads(frozenset(whole), is_sum)

    def _follows(self, node: Node, factor: Factor) -> bool:
        """Whether a node without gradients reads what nodes on parts may have made."""
        makers = (self.nodes[r.node] for r in node.refs if r.node in self.nodes)
        return any(self.reads(maker, factor) is not None for maker in makers)

    def _divides(self, block: Experts, factor: Factor) -> bool:
        """Whether ranks may have the rows of parts of a factor's tokens."""
        if factor not in leaves(block.tokens):
            return False
        read = {r for name in block.nodes for r in self.nodes[name].refs} - block.rows
        return all(
            self.is_without(r, factor) or self.place(r, factor) == self.place(block.ids, factor)
            for r in read
        )

    def _is_computed(self, node: Node, factor: Factor, whole: Iterable[Ref]) -> bool:
        """Whether the node's op has a form for parts like these."""
        if node.op == ATTENTION:  # of causal ones a rank has rows that follow each other
            place = self.place(Ref(node.name), factor)
            rows = place is not None and place[0] == ROWS_DIM
            return place is not None and not (node.args[4] and rows and place[1] > 1)
        if node.op in KEY_POSITION:
            lay = self.layout_of(Ref(node.name), factor)
            try:
                for rank in range(self.sharding.tp):
                    draw_blocks(node, lay, self.sharding.tp, rank)
            except (AssertionError, ShardError):  # no block of the array by which it is keyed
                return False
            return True
        return not (whole and node.op in SPECIAL)

    def layout_of(self, ref: Ref, factor: Factor) -> Layout:
        """The layout of a value on parts: cut where its place is, and nowhere else."""
        place = self.place(ref, factor)
        assert place is not None
        found: list[tuple[DimFactor, ...]] = [(DimFactor(full),) for full in self.dims.shapes[ref]]
        own = leaves(self.dims.of[ref][place[0]])
        at = own.index(factor)
        outer, inner = size(own[:at]), size(own[at + 1 :])
        around = (DimFactor(outer), DimFactor(factor.size, True), DimFactor(inner))
        found[place[0]] = tuple(f for f in around if f.split or f.size > 1)
        return Layout(tuple(found))

    def solve(self, factor: Factor) -> tuple[float, SequenceSplit | None]:
        """The cheapest set of nodes to run on parts of this factor's dim, and the seconds saved;
        None if that is none.
        """
        movable = self._movable(factor)
        cut = MinimumCut()
        for node in self.graph.nodes:
            if node.name in movable:
                self._add_node(cut, node, factor, movable)
            self._add_reads(cut, node, factor, movable, movable)
        for block in self.experts:  # on parts as a whole, or not at all
            first, *others = block.nodes
            if first not in movable:
                continue
            if self.sends:  # to other ranks, whatever it costs
                cut.add("source", first)
            for name in others:
                cut.add(first, name)
                cut.add(name, first)
        inside, saved_s = cut.source_side()
        nodes = frozenset(movable & inside)
        if not nodes:
            return 0.0, None
        kept = {
            Ref(name, k)
            for name in nodes
            if not self.is_sum(name, factor)
            for k, o in enumerate(self.nodes[name].outputs)
            if o is not None and self.place(Ref(name, k), factor) is not None
        }
        whole = {
            (name, ref)
            for name in nodes
            if (reads := self.reads(self.nodes[name], factor)) is not None
            for ref in reads.whole
        }
        layouts = self._layouts(nodes, kept, factor)
        counting = frozenset[str]().union(*(b.counting for b in self.experts)) & nodes
        return saved_s, SequenceSplit(nodes, frozenset(kept), layouts, frozenset(whole), counting)

    def _add_node(self, cut: MinimumCut, node: Node, factor: Factor, movable: Set[str]) -> None:
        """The cost of the node whole: the work that all ranks repeat; on parts, that of a sum."""
        work_s = divided_seconds(node, self.specs, self.machine)
        cut.add("source", node.name, (1 - 1 / self.sharding.tp) * PASSES * work_s)
        if self.is_sum(node.name, factor):
            made_bytes = sum(o.size_bytes for o in node.outputs if o is not None)
            cut.add(node.name, "sink", 2 * self._gathered_s(made_bytes))

    def _add_reads(
        self, cut: MinimumCut, node: Node, factor: Factor, movable: Set[str], exits: Set[str]
    ) -> None:
        """The cost of gathering and cutting the node's arguments. Of parameters none: their
        gradients are sums over the ranks whatever is split.
        """
        reads = self.reads(node, factor) if node.name in movable else None
        for ref in dict.fromkeys(node.refs):
            size_s = self._gathered_s(self.specs[ref].size_bytes)
            is_whole = reads is None or ref in reads.whole
            maker = ref.node if ref.node in movable and not self.is_sum(ref.node, factor) else ""
            if maker:
                cut.add(maker, f"gather:{ref}", size_s)
                cut.add(f"gather:{ref}", "sink" if is_whole else node.name)
            if reads is not None and ref in self.grads and ref not in self.parameters:
                cut.add(node.name, f"enter:{ref}")
                passes = 2 if is_whole or self.place(ref, factor) is None else 1
                cut.add(f"enter:{ref}", maker or "sink", passes * size_s)

    def _layouts(
        self, nodes: frozenset[str], kept: Iterable[Ref], factor: Factor
    ) -> Mapping[Ref, Layout]:
        read = {r for name in nodes for r in self.nodes[name].refs}
        return {
            ref: self.layout_of(ref, factor)
            for ref in {*read, *kept}
            if self.place(ref, factor) is not None
        }
