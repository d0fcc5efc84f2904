"""Which attentions on a cut sequence have keys and values passed around (`merakc.kernels.ring`).

A rank that gathers keys and values holds all of them, and waits for them; one that exchanges its
rows for heads waits for these, and needs heads enough. Where blocks of keys and values are passed
from rank to rank under the products, a rank holds two, and waits for what the products do not hide.

What is proven, or else left as it was: that queries, keys and values are blocks of the same rows,
in the same order; and, of a mask of bools, between which bounds each row sees anything, so that
blocks are not passed to where nobody attends to them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import product

import torch

from merakc.costs.device import place_on
from merakc.costs.fabric import all_gather_seconds, swap_seconds
from merakc.costs.nodes import divided_seconds, pipelined, ring_backward
from merakc.ir.graph import Node, Ref, TensorSpec
from merakc.kernels.ring.attention import RING
from merakc.passes.sharding.factors import Factor, leaves
from merakc.passes.sharding.layouts import RingSplit, SequenceSplit
from merakc.passes.sharding.sequences.exchange import before_repeats
from merakc.passes.sharding.sequences.heads import EXCHANGE_PRICE, Parts
from merakc.passes.sharding.sequences.ring_nodes import ROWS_DIM
from merakc.passes.sharding.sequences.sequence import FIGURES
from merakc.passes.sharding.spmd_ops import ATTENTION, START

# What the seconds of a ring count beside those of other forms. Tests have other figures.
RING_PRICE = 1.0
# Forwards that an attention's forward and backward take: that makes the scores again, and four more
# products of their size.
PASSES = 3.5
MASK, CAUSAL, WITHIN = 3, 4, 8  # among an attention's arguments
HEADS_DIM = 1


def with_rings(
    problem: Parts, sequences: Mapping[Factor, SequenceSplit], tp: int
) -> dict[Factor, SequenceSplit]:
    """The sequences, with the attentions whose keys and values are passed around as this costs
    least; each of `tp` ranks inside those of cp may have a block of the heads.
    """
    rings = _Rings(problem, tp)
    return {factor: rings.within(split, factor) for factor, split in sequences.items()}


class _Rings:
    """Which attentions of a graph could have keys and values passed around, and what that costs."""

    def __init__(self, problem: Parts, tp: int) -> None:
        self.problem, self.tp, self.ranks = problem, tp, problem.sharding.tp
        self.machine = place_on(FIGURES, self.ranks)
        self.readers = {ref for node in problem.graph.nodes for ref in node.refs}

    def within(self, split: SequenceSplit, factor: Factor) -> SequenceSplit:
        """One sequence, with its rings."""
        found = dict[str, RingSplit]()
        for name in sorted(split.nodes):
            node = self.problem.nodes[name]
            if node.op == ATTENTION and self._is_among_itself(node, split, factor):
                ring = self._ring(node, split)
                others_s = min(self._gathered_s(node, split), self._exchanged_s(node))
                if RING_PRICE * self._passed_s(node, ring, split) < others_s:
                    found[name] = ring
        keys = {(name, ref) for name in found for ref in self.problem.nodes[name].args[1:3]}
        return replace(split, whole=split.whole - keys, rings=found)

    def _is_among_itself(self, node: Node, split: SequenceSplit, factor: Factor) -> bool:
        """Whether rows of a sequence attend to the same rows, and a rank has a block of both."""
        query, key, value, mask = node.args[: MASK + 1]
        rows = [self.problem.dims.of[ref][ROWS_DIM] for ref in (query, key, value, Ref(node.name))]
        if any(leaves(dim) != [factor] for dim in rows) or Ref(node.name, 1) in self.readers:
            return False
        whole = {ref for name, ref in split.whole if name == node.name}
        if not {key, value} <= whole & split.kept or query in whole:
            return False
        if len(node.args) > START and node.args[START]:
            return False
        if not isinstance(mask, Ref):
            return mask is None
        spec = self.problem.specs[mask]
        if spec.dtype != torch.bool or len(spec.shape) < 2:
            return False
        return spec.shape[-2] == 1 or mask not in whole

    def _ring(self, node: Node, split: SequenceSplit) -> RingSplit:
        """How blocks are best passed."""
        rows, causal = self._rows(node, split), bool(node.args[CAUSAL])
        before = behind = sum(rows)
        if len(node.args) > WITHIN:
            before, behind = node.args[WITHIN]
        causal = causal or not behind
        first = [sum(rows[:k]) for k in range(self.ranks)]
        hops = {0}
        for rank, owner in product(range(self.ranks), repeat=2):
            low, high = first[rank] - before, first[rank] + rows[rank] + (0 if causal else behind)
            if low < first[owner] + rows[owner] and first[owner] < high:
                hops.add((rank - owner) % self.ranks)
        # Of a causal mask all ranks have as much to do where they swap rows, and each meets every
        # block; else the last has most, of every hop.
        swapped = causal and 2 * len(hops) > self.ranks + 1
        found = range(self.ranks) if swapped else sorted(hops)
        return RingSplit(tuple(found), swapped=swapped, causal=causal)

    def _rows(self, node: Node, split: SequenceSplit) -> list[int]:
        lay = split.layouts[node.args[0]]
        return [len(lay.index(ROWS_DIM, self.ranks, rank)) for rank in range(self.ranks)]

    def _passed_s(self, node: Node, ring: RingSplit, split: SequenceSplit) -> float:
        """Seconds of the slowest rank, forward and backward, where blocks are passed around."""
        rows, rank = self._rows(node, split), 0
        sources = (node.args[0], *map(self._source, node.args[1:3]))
        specs = {ref: self._part(ref, rows[rank]) for ref in (*sources, *node.made)}
        specs |= {ref: self.problem.specs[ref] for ref in node.refs if ref not in specs}
        mask, _, scale = node.args[MASK : MASK + 3]
        how = ("tp", tuple(rows), ring.hops, ring.swapped, rank)
        made = tuple(specs[ref] for ref in node.made)
        args = (*sources, mask, ring.causal, scale, None, *how)
        own = replace(node, op=RING, args=args, outputs=made)
        back = ring_backward(own, specs)
        seconds = sum(pipelined(n, specs, self.machine).seconds for n in (own, back))
        if ring.swapped:
            fabric, group = self.machine.fabric, self.machine.group("tp")
            sizes = (specs[ref].size_bytes / 2 for ref in (*sources, node.made[0]))
            seconds += sum(2 * swap_seconds(size, group, fabric) for size in sizes)
        return seconds

    def _part(self, ref: Ref, rows: int) -> TensorSpec:
        spec = self.problem.specs[ref]
        return TensorSpec((*spec.shape[:ROWS_DIM], rows, *spec.shape[ROWS_DIM + 1 :]), spec.dtype)

    def _gathered_s(self, node: Node, split: SequenceSplit) -> float:
        """Where keys and values are gathered."""
        query = node.args[0]
        rows = split.layouts[query].local_shape(self.ranks, 0)
        part = {**self.problem.specs, query: TensorSpec(rows, self.problem.specs[query].dtype)}
        work_s = PASSES * divided_seconds(node, part, self.machine)
        return work_s + 2 * sum(map(self._wire_s, node.args[1:3]))

    def _exchanged_s(self, node: Node) -> float:
        """Where rows are exchanged for heads; no end of them where there are too few."""
        specs = self.problem.specs
        heads, groups = (self._heads(ref) for ref in (node.args[0], node.args[1]))
        if heads % (self.tp * self.ranks):
            return torch.inf
        work_s = PASSES * divided_seconds(node, specs, self.machine) / self.ranks
        each = 1 if groups % (self.tp * self.ranks) else self.ranks
        of_rows = sum(map(self._wire_s, (node.args[0], Ref(node.name)))) / self.ranks
        of_keys = sum(map(self._wire_s, node.args[1:3])) / each
        return work_s + 2 * EXCHANGE_PRICE * (of_rows + of_keys)

    def _heads(self, ref: Ref) -> int:
        return self.problem.specs[self._source(ref)].shape[HEADS_DIM]

    def _source(self, ref: Ref) -> Ref:
        """What a value of heads was repeated from, that is sent in its place."""
        source, _ = before_repeats(ref, self.problem.nodes)
        specs = self.problem.specs
        is_less = specs[source].numel < specs[ref].numel and len(specs[source].shape) == 4
        return source if is_less else ref

    def _wire_s(self, ref: Ref) -> float:
        """Seconds of a gather."""
        size_bytes = self.problem.specs[self._source(ref)].size_bytes
        return all_gather_seconds(size_bytes, self.machine.group("tp"), self.machine.fabric)
