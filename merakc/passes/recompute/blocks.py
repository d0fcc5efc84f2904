"""The blocks of a stage: what lies between two places of its forward that one value passes.

Nothing is told by names. Where a value that carries gradients is alone alive, what follows can be
made again from it; what does not depend on parameters (masks, tables of angles) passes everywhere.
Where a value passes most of a long stretch beside others (the output of an encoder, a skip), that
stretch is looked at again without it; where values are in parts, its narrowest places count. Layers
are repetitions of blocks of equal form.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from merakc.analysis.aliases import view_roots
from merakc.ir.graph import Graph, InputKind, Node, OutputKind, Ref
from merakc.ir.recompute import Keep, Run
from merakc.passes.autodiff.recompute import KEPT_BY_SELECTIVE

# A stretch between two cuts is looked at again where its nodes are more than that share of all, and
# it has more expensive calls than half of a layer: without values that are alive in more than the
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
    size_bytes: int


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
    roots, grads, specs = view_roots(forward), forward.grad_values(), forward.specs()
    made = {Ref(i.name): -1 for i in forward.inputs if i.kind is InputKind.ACTIVATION}
    last: dict[Ref, int] = {}
    for k, node in enumerate(nodes):
        for ref in node.refs:
            last[roots.get(ref, ref)] = k
        made |= {ref: k for ref in node.made if ref not in roots}
    return [
        _Life(r, k, last[r], specs[r].size_bytes)
        for r, k in made.items()
        if r in grads and last.get(r, k) > k
    ]


def _cuts(
    lives: Sequence[_Life], within: tuple[int, int], nodes: Sequence[Node]
) -> dict[int, tuple[Ref, ...]]:
    """The places in a stretch that one value alone passes, with that value: the first of each."""
    found = _places(lives, within)
    bounds = sorted({*within, *found})
    for a, b in pairwise(bounds):
        expensive = sum(node.op in KEPT_BY_SELECTIVE for node in nodes[a:b])
        if b - a <= LONG * len(nodes) or expensive <= EXPENSIVE:
            continue
        inside = [life for life in lives if min(life.last, b) - max(life.made, a) > 0]
        shorter = [x for x in inside if min(x.last, b) - max(x.made, a) < THROUGHOUT * (b - a)]
        if len(shorter) < len(inside):
            found |= _cuts(shorter, (a, b), nodes)
        else:  # a value may be in several parts: they are as narrow as it is
            least = min(_bytes(alive) for _, alive in _alive(inside, (a, b)))
            narrow = _places(inside, (a, b), least)
            found |= narrow
            for within in pairwise([a, *narrow, b]) if narrow else ():
                found |= _cuts(inside, within, nodes)
    return found


def _places(
    lives: Sequence[_Life], within: tuple[int, int], most_bytes: int = 0
) -> dict[int, tuple[Ref, ...]]:
    """The first places in a stretch that one value passes alone, or several of so many bytes."""
    seen: set[frozenset[_Life]] = set()
    found = {}
    for p, alive in _alive(lives, within):
        if (len(alive) == 1 or _bytes(alive) <= most_bytes) and alive and alive not in seen:
            seen.add(alive)
            found[p] = tuple(sorted(life.ref for life in alive))
    return found


def _bytes(lives: Iterable[_Life]) -> int:
    return sum(life.size_bytes for life in lives)


def _alive(
    lives: Sequence[_Life], within: tuple[int, int]
) -> Iterator[tuple[int, frozenset[_Life]]]:
    """What is alive before each node of a stretch but the first."""
    starts, ends = defaultdict[int, set[_Life]](set), defaultdict[int, set[_Life]](set)
    a, b = within
    for life in lives:
        starts[max(life.made, a) + 1].add(life)
        ends[life.last + 1].add(life)
    alive: set[_Life] = set()
    for p in range(a + 1, b):
        alive = (alive | starts[p]) - ends[p]
        yield p, frozenset(alive)


def _form(nodes: Sequence[Node], needed: set[str]) -> object:
    """What a block computes: ops, shapes, and which of its own values are read. Numbers are left
    out: draws have others in every layer.
    """
    own = [node for node in nodes if node.name in needed]
    place = {node.name: k for k, node in enumerate(own)}
    return tuple(
        (n.op, tuple((place.get(r.node, -1), r.index) for r in n.refs), n.outputs) for n in own
    )


@dataclass(frozen=True, slots=True)
class Layers:
    """Blocks that repeat: the first, behind the last, and how many make a layer."""

    start: int
    end: int
    period: int = 1


def find_layers(blocks: Sequence[Block], start: int = 0, end: int | None = None) -> list[Layers]:
    """The repetitions among blocks, in order: the longest, and those before and behind it."""
    end = len(blocks) if end is None else end
    best = Layers(start, start)
    for period in range(1, PERIODS + 1):
        run = 0
        for k in range(start, end - period):
            run = run + 1 if blocks[k].form == blocks[k + period].form else 0
            total = (run + period) // period * period
            if run >= period and total > best.end - best.start:
                best = Layers(k + 1 - run, k + 1 - run + total, period)
    if best.start == best.end:
        return []
    before, behind = find_layers(blocks, start, best.start), find_layers(blocks, best.end, end)
    return [*before, best, *behind]


def by_layers(blocks: Sequence[Block], forward: Graph, keep: Keep) -> tuple[Run, ...]:
    """The runs that make every layer again, of the forward as `in_place` gives it, and every block
    that does not repeat.

    Where layers keep little beside what they read, several are made again together: as many as
    leave least alive, the root of their number times that share. What comes before and between
    layers is made again as well, and behind them what other stages go on from: a loss is followed
    at once by its backward.
    """
    found = find_layers(blocks)
    at_once = any(o.kind.begins_gradients for o in forward.outputs)
    end = found[-1].end if at_once and found else len(blocks)
    if keep is Keep.PRODUCTS:
        return (Run(keep, 1),) * end + _kept(len(blocks) - end)
    sizes: list[int] = []
    of = _Sizes(blocks, forward)
    for layers in found:
        sizes += of.apart(sum(sizes), layers.start)
        size = layers.period * of.together(layers)
        sizes += [min(size, layers.end - k) for k in range(layers.start, layers.end, size)]
    sizes += of.apart(sum(sizes), end)
    if at_once and end == len(blocks) and len(sizes) > 1:  # the last is read at once, too
        end -= sizes.pop()
    return (*(Run(keep, size) for size in sizes), *_kept(len(blocks) - end))


class _Sizes:
    """How many blocks are best made again together, by the bytes that they keep and read."""

    def __init__(self, blocks: Sequence[Block], forward: Graph) -> None:
        specs, saved = forward.specs(), saved_roots(forward)
        names = [{node.name for node in forward.nodes[b.start : b.end]} for b in blocks]
        self.kept = [sum(specs[r].size_bytes for r in saved if r.node in own) for own in names]
        self.read = [sum(specs[r].size_bytes for r in b.crossing) for b in blocks]

    def together(self, layers: Layers) -> int:
        """How many layers."""
        own = range(layers.start, layers.end)
        count = len(own) // layers.period
        read_bytes = sum(self.read[k] for k in own[:: layers.period])
        kept_bytes = max(sum(self.kept[k] for k in own), 1)
        return max(round(math.sqrt(count * read_bytes / kept_bytes)), 1)

    def apart(self, start: int, end: int) -> Iterator[int]:
        """Sizes of the runs of blocks that do not repeat: those that keep more than they read."""
        first = start
        for k in range(start, end):
            if sum(self.kept[first : k + 1]) > self.read[first] or k + 1 == end:
                yield k + 1 - first
                first = k + 1


def _kept(blocks: int) -> tuple[Run, ...]:
    return (Run(Keep.KEPT, blocks),) if blocks else ()


def saved_roots(forward: Graph) -> set[Ref]:
    """The memory that a forward keeps for its backward, by what is in it; inputs are not in it."""
    roots, inputs = view_roots(forward), {i.name for i in forward.inputs}
    saved = (o.ref for o in forward.outputs if o.kind is OutputKind.SAVED)
    return {root for r in saved if (root := roots.get(r, r)).node not in inputs}
