"""What each block of a stage takes, kept or made again: the figures that a choice is made by."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from merakc.analysis.aliases import last_uses, view_roots
from merakc.analysis.liveness import owners, working_bytes
from merakc.costs.device import Place
from merakc.costs.nodes import node_seconds
from merakc.ir.graph import Graph, Node, OutputKind, Ref
from merakc.ir.program import StageGraphs
from merakc.passes.autodiff.recompute import selective
from merakc.passes.recompute.blocks import find_blocks, in_place, needed_nodes, saved_roots


@dataclass(frozen=True, slots=True)
class BlockCost:
    """Bytes and seconds of a block.

    `entering_bytes` are what it reads of the block before it, of which its backward reads
    `read_bytes`; `saved_bytes` what its backward reads beside, `product_bytes` what is kept of that
    where products are. The forward has `forward_bytes` alive at its highest point, but for what
    enters; the backward `backward_bytes` of gradients, and `begin_bytes` before it begins.

    To make again what it hands on takes `again_s`, what is saved alone `tail_s`, and from what
    products have made `product_s`.
    """

    entering_bytes: int
    read_bytes: int
    saved_bytes: int
    product_bytes: int
    forward_bytes: int
    backward_bytes: int
    begin_bytes: int
    again_s: float
    tail_s: float
    product_s: float


def block_costs(stage: StageGraphs, place: Place) -> tuple[BlockCost, ...]:
    """The costs of the blocks of a stage that keeps everything (`find_blocks`)."""
    return _Stage(replace(stage, forward=in_place(stage.forward)), place).costs()


class _Stage:
    """A stage with its forward in place, and what is asked of all its blocks."""

    def __init__(self, stage: StageGraphs, place: Place) -> None:
        assert stage.backward is not None
        self.forward: Graph = stage.forward
        self.backward: Graph = stage.backward
        self.blocks = find_blocks(self.forward)
        self.specs, self.roots = self.forward.specs(), view_roots(self.forward)
        self.nodes = [self.forward.nodes[b.start : b.end] for b in self.blocks]
        self.block_of = {n.name: k for k, own in enumerate(self.nodes) for n in own}
        # What serves the backward alone takes no longer there.
        needed = needed_nodes(self.forward)
        nodes = (n for n in self.forward.nodes if n.name in needed)
        self.seconds = {n.name: node_seconds(n, self.specs, place) for n in nodes}
        self.crossing = [{self.root(r) for r in b.crossing} for b in self.blocks]
        # What other blocks read is kept, whatever is chosen, but where it enters the next alone.
        self.elsewhere = self._read_elsewhere()
        self.apart = self.elsewhere.union(*self.crossing)
        self.products = selective(stage)

    def root(self, ref: Ref) -> Ref:
        return self.roots.get(ref, ref)

    def bytes_of(self, refs: Iterable[Ref]) -> int:
        return sum(self.specs[ref].size_bytes for ref in set(refs))

    def costs(self) -> tuple[BlockCost, ...]:
        saved = saved_roots(self.forward)
        outs = [o.ref for o in self.forward.outputs if o.kind is OutputKind.SAVED]
        wanted = [r for r in outs if self.root(r) not in self.apart]
        working, spans = self._working_bytes(), self._spans()
        found = []
        for k, own in enumerate(self.nodes):
            here = [r for r in wanted if self.block_of.get(r.node) == k]
            products = {self.root(r) for r in self.products if self.block_of.get(r.node) == k}
            onward = self.crossing[k + 1] if k + 1 < len(self.blocks) else set[Ref]()
            first, last = spans[k]
            found.append(
                BlockCost(
                    entering_bytes=self.bytes_of(self.crossing[k]),
                    read_bytes=self.bytes_of(self.crossing[k] & saved),
                    saved_bytes=self.bytes_of(map(self.root, here)),
                    product_bytes=self.bytes_of(products - self.apart),
                    forward_bytes=self._forward_bytes(own, onward.union(map(self.root, here))),
                    backward_bytes=max(working[first:last], default=0),
                    begin_bytes=working[first - 1] if first else 0,
                    again_s=self._again_s(own, [*here, *onward], ()),
                    tail_s=self._again_s(own, here, ()),
                    product_s=self._again_s(own, here, self.products),
                )
            )
        return tuple(found)

    def _read_elsewhere(self) -> set[Ref]:
        found: set[Ref] = set()
        crossing = set().union(*self.crossing)
        for node in self.forward.nodes:
            here = self.block_of[node.name]
            roots = (self.root(ref) for ref in node.refs)
            found.update(
                r for r in roots if r not in crossing and self.block_of.get(r.node, here) != here
            )
        return found

    def _again_s(self, own: Sequence[Node], wanted: Iterable[Ref], there: Collection[Ref]) -> float:
        """Seconds of making values of a block again, from what is `there` and what enters it."""
        needed, total_s = {ref.node for ref in wanted if ref not in there}, 0.0
        for node in reversed(own):
            if node.name in needed:
                total_s += self.seconds.get(node.name, 0.0)
                read = (
                    r for r in node.refs if r not in there and self.root(r) not in self.elsewhere
                )
                needed |= {ref.node for ref in read}
        return total_s

    def _forward_bytes(self, own: Sequence[Node], kept: Collection[Ref]) -> int:
        """The most that is alive of what a block makes."""
        last: dict[Ref, int] = {}
        for k, node in enumerate(own):
            last |= {self.root(ref): k for ref in (*node.refs, *node.made)}
        made = {ref for node in own for ref in node.made if self.root(ref) == ref}
        ending = Counter[int]()
        for ref in made - set(kept):
            ending[last[ref]] += self.specs[ref].size_bytes
        alive = most = 0
        for k, node in enumerate(own):
            alive += self.bytes_of(made.intersection(node.made))
            most = max(most, alive)
            alive -= ending[k]
        return most

    def _working_bytes(self) -> list[int]:
        """What the backward has alive at each of its nodes that it made itself; gradients of inputs
        go at once into their sums.
        """
        graph = self.backward
        home, specs = owners(graph), graph.specs()
        inputs, ending = {i.name for i in graph.inputs}, Counter[int]()
        for ref, k in last_uses(graph, home).items():
            if ref.node not in inputs:
                ending[k] += specs[ref].size_bytes
        alive, found = 0, []
        for k, node in enumerate(graph.nodes):
            alive += sum(specs[ref].size_bytes for ref in node.made if home[ref] == ref)
            found.append(alive + working_bytes(node, specs))
            alive -= ending[k]
        return found

    def _spans(self) -> list[tuple[int, int]]:
        """The nodes of the backward, from the first to behind the last, of each block: the last
        block's come first, and each begins where what it alone saved is first read.
        """
        made = {f"saved:{o.ref}": o.ref for o in self.forward.outputs if o.kind is OutputKind.SAVED}
        places: dict[int, list[int]] = {}
        seen: set[str] = set()
        for place, node in enumerate(self.backward.nodes):
            for name in {ref.node for ref in node.refs} - seen:
                seen.add(name)
                if name in made and self.root(made[name]) not in self.apart:
                    places.setdefault(self.block_of[made[name].node], []).append(place)
        at, end = 0, len(self.backward.nodes)
        starts = []
        for k in range(len(self.blocks) - 1, -1, -1):
            at = min((p for p in places.get(k, ()) if p >= at), default=at)
            starts.append(at)
        ends = [*starts[1:], end]
        return [(a, max(b, a + 1)) for a, b in zip(starts, ends, strict=True)][::-1]
