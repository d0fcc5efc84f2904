"""Rewrites a stage so that its backward makes again what blocks of its forward do not keep.

Each run of blocks is a segment: the backward repeats those of its nodes that lead to what is read,
right before the first of them is. The schedule and the Programs stay as they are.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from merakc.analysis.aliases import view_roots
from merakc.ir.graph import Graph, Input, InputKind, Node, Output, OutputKind, Ref, map_refs
from merakc.ir.program import StageGraphs
from merakc.ir.recompute import Keep, Run, again_name
from merakc.passes.autodiff.recompute import selective, sorted_refs
from merakc.passes.recompute.blocks import Block, find_blocks, in_place, needed_nodes

SAVED: Final = "saved:"


@dataclass(frozen=True, slots=True)
class Segment:
    """Nodes of the forward to repeat for the values that are `wanted`, of which the backward reads
    each, from those of others that it `reads`.
    """

    number: int
    wanted: tuple[Ref, ...]
    nodes: tuple[Node, ...]
    reads: frozenset[Ref]


def recomputed(stage: StageGraphs, runs: Sequence[Run]) -> StageGraphs:
    """The stage whose backward makes again what these runs of its blocks say, those of
    `find_blocks`. Where another number of blocks was found, the runs are stretched.

    Its halves and a recomputation by the schedule are to be made of the stage that this gives.
    """
    if stage.backward is None or all(run.keep is Keep.KEPT for run in runs):
        return stage
    stage = replace(stage, forward=in_place(stage.forward))
    blocks = find_blocks(stage.forward)
    runs = stretched(runs, len(blocks))
    segment_of = _segment_of(stage.forward, blocks, runs)
    kept = _kept(stage, segment_of, _products(stage, blocks, runs))
    segments, kept = _segments(stage, segment_of, kept)
    return _written(stage, segments, kept)


def stretched(runs: Sequence[Run], blocks: int) -> tuple[Run, ...]:
    """The runs of as many blocks, each as far along as it was."""
    total = sum(run.blocks for run in runs)
    if total == blocks:
        return tuple(runs)
    found, at, done = [], 0, 0
    for run in runs:
        at += run.blocks
        end = at * blocks // total
        if end > done:
            found.append(Run(run.keep, end - done))
            done = end
    return tuple(found)


def _segment_of(forward: Graph, blocks: Sequence[Block], runs: Sequence[Run]) -> dict[str, int]:
    """The number of the segment of each node that is in one."""
    found: dict[str, int] = {}
    at = 0
    for number, run in enumerate(runs):
        first, last = blocks[at], blocks[at + run.blocks - 1]
        at += run.blocks
        if run.keep is not Keep.KEPT:
            found |= {node.name: number for node in forward.nodes[first.start : last.end]}
    return found


def _products(stage: StageGraphs, blocks: Sequence[Block], runs: Sequence[Run]) -> set[Ref]:
    """What blocks keep that keep their products."""
    names: set[str] = set()
    at = 0
    for run in runs:
        if run.keep is Keep.PRODUCTS:
            first, last = blocks[at], blocks[at + run.blocks - 1]
            names.update(node.name for node in stage.forward.nodes[first.start : last.end])
        at += run.blocks
    return {ref for ref in selective(stage) if ref.node in names} if names else set()


def _kept(stage: StageGraphs, segment_of: Mapping[str, int], products: set[Ref]) -> set[Ref]:
    """What the forward keeps anyway: what is saved in no segment, or lies in memory that others
    than its own segment read, and the products.
    """
    forward = stage.forward
    roots, needed = view_roots(forward), needed_nodes(forward)
    readers: dict[Ref, set[int | None]] = {}
    for node in forward.nodes:
        if node.name in needed:
            for ref in node.refs:
                readers.setdefault(roots.get(ref, ref), set()).add(segment_of.get(node.name))
    found = set(products)
    for out in forward.outputs:
        if out.kind is OutputKind.SAVED:
            own = segment_of.get(out.ref.node)
            if own is None or readers.get(roots.get(out.ref, out.ref), set()) - {own}:
                found.add(out.ref)
    return found


def _segments(
    stage: StageGraphs, segment_of: Mapping[str, int], kept: set[Ref]
) -> tuple[list[Segment], set[Ref]]:
    """The segments, and what is kept for them: each keeps what it reads of others."""
    forward, backward = stage.forward, stage.backward
    assert backward is not None
    read = {item.target for item in backward.inputs if item.kind is InputKind.SAVED}
    saved = [o.ref for o in forward.outputs if o.kind is OutputKind.SAVED and o.name in read]
    nodes: dict[int, list[Node]] = {}
    for node in forward.nodes:
        if node.name in segment_of:
            nodes.setdefault(segment_of[node.name], []).append(node)
    while True:
        found = []
        for number, own in nodes.items():
            wanted = tuple(r for r in saved if segment_of.get(r.node) == number and r not in kept)
            if wanted:
                found.append(_segment(number, wanted, own, segment_of, kept))
        reads = {ref for segment in found for ref in segment.reads}
        if reads <= kept:
            return found, kept
        kept = kept | reads


def _segment(
    number: int, wanted: tuple[Ref, ...], nodes: Sequence[Node], segment_of: Mapping[str, int],
    kept: Collection[Ref],
) -> Segment:  # fmt: skip
    needed, repeated = {ref.node for ref in wanted}, []
    reads: set[Ref] = set()
    for node in reversed(nodes):
        if node.name in needed:
            repeated.append(node)
            own = {r for r in node.refs if segment_of.get(r.node) == number and r not in kept}
            needed.update(ref.node for ref in own)
            reads.update(set(node.refs) - own)
    return Segment(number, wanted, tuple(reversed(repeated)), frozenset(reads))


def _written(stage: StageGraphs, segments: Sequence[Segment], kept: Collection[Ref]) -> StageGraphs:
    forward, backward = stage.forward, stage.backward
    assert backward is not None
    specs, inputs = forward.specs(), {Ref(i.name): i for i in forward.inputs}
    given = {
        ref: Input(sys.intern(f"{SAVED}{ref}"), InputKind.SAVED, specs[ref], sys.intern(str(ref)))
        for ref in sorted_refs(set(kept) - inputs.keys())
    }
    named = {i.target: i.name for i in backward.inputs if i.kind is InputKind.SAVED}
    names: dict[Ref, Ref] = {}
    before: dict[int, list[Node]] = {}
    first = _first_readers(backward)
    for segment in segments:
        own = {n.name: sys.intern(again_name(segment.number, n.name)) for n in segment.nodes}

        def now(ref: Ref, own: Mapping[str, str] = own) -> Ref:
            if ref in given:
                return Ref(given[ref].name)
            return Ref(own.get(ref.node, ref.node), ref.index)

        at = min(first[named[str(ref)]] for ref in segment.wanted)
        before.setdefault(at, []).extend(
            replace(n, name=own[n.name], args=map_refs(n.args, now), kwargs=map_refs(n.kwargs, now))
            for n in segment.nodes
        )
        names |= {Ref(named[str(r)]): Ref(own[r.node], r.index) for r in segment.wanted}
    nodes: list[Node] = []
    for k, node in enumerate(backward.nodes):
        nodes += [*before.get(k, ()), node]
    nodes += before.get(len(backward.nodes), ())
    every = dict.fromkeys((*backward.inputs, *given.values(), *forward.inputs))
    made = Graph(
        tuple(every), tuple(nodes), backward.outputs,
        {**forward.constants, **backward.constants}, {**forward.functions, **backward.functions},
    ).renamed(names).without_unread_inputs()  # fmt: skip
    wanted = {i.target for i in made.inputs if i.kind is InputKind.SAVED}
    results = (o for o in forward.outputs if o.kind is not OutputKind.SAVED)
    outs = (Output(i.target, OutputKind.SAVED, r) for r, i in given.items() if i.target in wanted)
    less = replace(forward, outputs=(*results, *outs)).pruned()
    return replace(stage, forward=less, backward=made)


def _first_readers(backward: Graph) -> dict[str, int]:
    """The place of the first node that reads each input; behind the last where none does."""
    found = {item.name: len(backward.nodes) for item in backward.inputs}
    for k in range(len(backward.nodes) - 1, -1, -1):
        found |= {ref.node: k for ref in backward.nodes[k].refs if ref.node in found}
    return found
