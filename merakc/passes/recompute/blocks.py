"""The blocks of a stage: what lies between two places of its forward that one value passes.

Nothing is told by names. Where a value that carries gradients is alone alive, what follows can be
made again from it; what does not depend on parameters (masks, tables of angles) passes everywhere.
Where a value passes most of a long stretch beside others (the output of an encoder, a skip), that
stretch is looked at again without it. Layers are the longest repetition of blocks of equal form.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from merakc.analysis.aliases import view_roots
from merakc.ir.graph import Graph, InputKind, Node, OutputKind, Ref
from merakc.ir.recompute import Keep, Run
from merakc.passes.autodiff.recompute import KEPT_BY_SELECTIVE

# A stretch between two cuts is looked at again where its nodes are more than that share of all, with
# more expensive calls than half of a layer has: without values that are alive in more than the
# other share of it.
LONG, EXPENSIVE, THROUGHOUT = 0.25, 6, 0.75
# The most blocks of one layer.
PERIODS = 8


@dataclass(frozen=True, slots=True)
class Block:
    """The nodes of a forward from `start` to before `end`; `form` is equal for blocks that compute
    the same of other values. It reads `crossing` of the blocks before it, and what passes all.
    """

    start: int
    end: int
    form: int
    crossing: tuple[Ref, ...]


@dataclass(frozen=True, slots=True)
class _Life:
    """A value that carries gradients, by its root: the node that makes it, -1 for what the stage
    received, and its last reader.
    """

    ref: Ref
    made: int
    last: int


def needed_nodes(forward: Graph) -> set[str]:
    """The nodes that a forward's results need; the others serve its backward alone."""
    results = tuple(o for o in forward.outputs if o.kind is not OutputKind.SAVED)
    return {n.name for n in replace(forward, outputs=results).pruned().nodes}


def in_place(forward: Graph) -> Graph:
    """The forward with nodes that serve the backward alone right behind what they read."""
    needed = needed_nodes(forward)
    place: dict[str, tuple[int, int]] = {}
    for k, node in enumerate(forward.nodes):
        if node.name in needed:
            place[node.name] = k, 0
        else:
            read = (place[r.node] for r in node.refs if r.node in place)
            place[node.name] = max(read, default=(k, 0))[0], k + 1
    nodes = sorted(forward.nodes, key=lambda node: place[node.name])
    return replace(forward, nodes=tuple(nodes))


def find_blocks(forward: Graph) -> tuple[Block, ...]:
    """The blocks of a forward as `in_place` gives it, without a gap; one where there is no cut."""
    needed = needed_nodes(forward)
    places = [k for k, node in enumerate(forward.nodes) if node.name in needed]
    nodes = [forward.nodes[k] for k in places]
    if not nodes:
        return ()
    cuts = _cuts(_lives(forward, nodes), (0, len(nodes)), nodes)
    saved = {o.ref.node for o in forward.outputs if o.kind is OutputKind.SAVED}
    starts, crossings = [0], [tuple[Ref, ...]()]
    for p in sorted(cuts):
        # What keeps nothing is no block of its own.
        end = min((q for q in cuts if q > p), default=len(nodes))
        own = forward.nodes[places[p] : places[end] if end < len(nodes) else None]
        if any(node.name in saved for node in own):
            starts.append(places[p])
            crossings.append(cuts[p])
    forms: dict[object, int] = {}
    ends = [*starts[1:], len(forward.nodes)]
    return tuple(
        Block(a, b, forms.setdefault(_form(forward.nodes[a:b], needed), len(forms)), crossing)
        for a, b, crossing in zip(starts, ends, crossings, strict=True)
    )


def _lives(forward: Graph, nodes: Sequence[Node]) -> list[_Life]:
    roots, grads = view_roots(forward), forward.grad_values()
    made = {Ref(i.name): -1 for i in forward.inputs if i.kind is InputKind.ACTIVATION}
    last: dict[Ref, int] = {}
    for k, node in enumerate(nodes):
        for ref in node.refs:
            last[roots.get(ref, ref)] = k
        made |= {ref: k for ref in node.made if ref not in roots}
    return [_Life(r, k, last[r]) for r, k in made.items() if r in grads and last.get(r, k) > k]


def _cuts(
    lives: Sequence[_Life], within: tuple[int, int], nodes: Sequence[Node]
) -> dict[int, tuple[Ref, ...]]:
    """The places in a stretch that one value alone passes, with that value: the first of each."""
    found = dict(_alone(lives, within))
    bounds = sorted({*within, *found})
    for a, b in pairwise(bounds):
        expensive = sum(node.op in KEPT_BY_SELECTIVE for node in nodes[a:b])
        if b - a <= LONG * len(nodes) or expensive <= EXPENSIVE:
            continue
        inside = [life for life in lives if min(life.last, b) - max(life.made, a) > 0]
        shorter = [x for x in inside if min(x.last, b) - max(x.made, a) < THROUGHOUT * (b - a)]
        if len(shorter) < len(inside):
            found |= _cuts(shorter, (a, b), nodes)
    return found


def _alone(lives: Sequence[_Life], within: tuple[int, int]) -> Iterator[tuple[int, tuple[Ref]]]:
    starts, ends = defaultdict[int, list[Ref]](list), defaultdict[int, list[Ref]](list)
    a, b = within
    alive: set[Ref] = set()
    for life in lives:
        if life.made < a < life.last + 1:
            alive.add(life.ref)
        elif a <= life.made < b:
            starts[life.made + 1].append(life.ref)
        ends[life.last + 1].append(life.ref)
    seen: set[Ref] = set()
    for p in range(a + 1, b):
        alive |= set(starts[p])
        alive -= set(ends[p])
        if len(alive) == 1 and not alive <= seen:
            seen |= alive
            yield p, (next(iter(alive)),)


def _form(nodes: Sequence[Node], needed: set[str]) -> object:
    """What a block computes: ops, shapes, and which of its own values are read. Numbers are left
    out: draws have others in every layer.
    """
    own = [node for node in nodes if node.name in needed]
    place = {node.name: k for k, node in enumerate(own)}
    return tuple(
        (n.op, tuple((place.get(r.node, -1), r.index) for r in n.refs), n.outputs) for n in own
    )


def find_layers(blocks: Sequence[Block]) -> tuple[int, int, int]:
    """The longest repetition: its first block, how many repeat, and how many make a layer; of
    blocks that do not repeat, all of them, one by one.
    """
    best = (0, len(blocks), 1) if len(blocks) < 2 else (0, 0, 1)
    for period in range(1, PERIODS + 1):
        run = 0
        for k in range(len(blocks) - period):
            run = run + 1 if blocks[k].form == blocks[k + period].form else 0
            total = (run + period) // period * period
            if run >= period and total > best[1]:
                best = k + 1 - run, total, period
    return best if best[1] else (0, len(blocks), 1)


def by_layers(blocks: Sequence[Block], forward: Graph, keep: Keep) -> tuple[Run, ...]:
    """The runs that make every layer again, of the forward as `in_place` gives it.

    Where layers keep little beside what they read, several are made again together: as many as
    leave least alive, the root of their number times that share. What comes before the layers is
    made again as well, and behind them what other stages go on from: a loss is followed at once by
    its backward.
    """
    first, count, period = find_layers(blocks)
    at_once = any(o.kind.begins_gradients for o in forward.outputs)
    if keep is Keep.PRODUCTS:
        end = first + count if at_once else len(blocks)
        return (Run(keep, 1),) * end + _kept(len(blocks) - end)
    specs, layers = forward.specs(), max(count // period, 1)
    saved = saved_roots(forward)
    names = [{node.name for node in forward.nodes[b.start : b.end]} for b in blocks]
    own = [sum(specs[r].size_bytes for r in saved if r.node in inside) for inside in names]
    layer_bytes = sum(own[first : first + count]) / layers
    crossing = [sum(specs[r].size_bytes for r in b.crossing) for b in blocks]
    read_bytes = sum(crossing[first : first + count : period]) / layers
    together = round(math.sqrt(layers * read_bytes / max(layer_bytes, 1.0)))
    sizes = [period * min(max(together, 1), layers - k) for k in range(0, layers, max(together, 1))]
    left = len(blocks) - first - count
    if at_once and not left and len(sizes) > 1:
        left = sizes.pop()
    runs = [Run(keep, size) for size in (first, *sizes) if size]
    return (*runs, *(_kept(left) if at_once or not left else (Run(keep, left),)))


def _kept(blocks: int) -> tuple[Run, ...]:
    return (Run(Keep.KEPT, blocks),) if blocks else ()


def saved_roots(forward: Graph) -> set[Ref]:
    """The memory that a forward keeps for its backward, by what is in it; inputs are not in it."""
    roots, inputs = view_roots(forward), {i.name for i in forward.inputs}
    saved = (o.ref for o in forward.outputs if o.kind is OutputKind.SAVED)
    return {root for r in saved if (root := roots.get(r, r)).node not in inputs}
