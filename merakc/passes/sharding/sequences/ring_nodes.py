"""The nodes of an attention to which keys and values are passed around (`merakc.kernels.ring`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from merakc.ir.graph import Node, Ref, TensorSpec, map_refs
from merakc.kernels.ring.attention import RING
from merakc.kernels.ring.pieces import halves
from merakc.kernels.ring.swap import SWAP
from merakc.passes.sharding.dims import given
from merakc.passes.sharding.layouts import RingSplit
from merakc.passes.sharding.spmd_ops import Writer

ROWS_DIM = 2  # of queries, keys, values and results
MASK, SCALE = 3, 5  # among an attention's arguments


def write_ring(out: Writer, node: Node, ring: RingSplit) -> None:
    """Adds the attention of this rank's rows to those of all ranks; of rows that are swapped for
    it, with the swaps around it.
    """
    lay, ranks = out.sharding.layouts[Ref(node.name)], out.sharding.tp
    rows = tuple(len(lay.index(ROWS_DIM, ranks, r)) for r in range(ranks))
    *read, _, scale = map_refs(node.args[: SCALE + 1], out.enter)
    sink = given(node, "sink")
    sink = None if sink is None else out.enter(sink)
    rest = (ring.causal, scale, sink, out.axis, rows, ring.hops, ring.swapped, out.rank)
    if not ring.swapped:
        out.add(replace(node, kwargs=()), (*read, *rest), RING)
        return
    swap = _Swap(out, *halves(rows))
    for place, ref in enumerate(node.args[: MASK + 1]):
        if isinstance(ref, Ref) and out.local_spec(ref).shape[-2] > 1:
            read[place] = swap.node(ref, read[place])
    specs = [out.local_spec(ref) for ref in node.made]
    whole = replace(
        node, name=out.named(Ref(node.name), "ring"), op=RING, kwargs=(), args=(*read, *rest),
        outputs=tuple(swap.spec(spec, ROWS_DIM) for spec in specs),
    )  # fmt: skip
    out.nodes.append(whole)
    back = (Ref(whole.name), out.axis, ROWS_DIM, swap.stay, swap.go[::-1], out.rank)
    out.nodes.append(replace(node, op=SWAP, args=back, kwargs=(), outputs=(specs[0],)))


class _Swap:
    """Swaps the later halves of a rank's rows for those of another."""

    def __init__(self, out: Writer, stay: Sequence[int], go: Sequence[int]) -> None:
        self.out, self.stay, self.go = out, stay, go

    def spec(self, spec: TensorSpec, dim: int) -> TensorSpec:
        """That of what a rank then has."""
        count = self.stay[self.out.rank] + self.go[len(self.go) - 1 - self.out.rank]
        return TensorSpec((*spec.shape[:dim], count, *spec.shape[dim + 1 :]), spec.dtype)

    def node(self, ref: Ref, now: Ref) -> Ref:
        """A value of the graph, `now` that of this rank, with its rows swapped; made once."""
        name, spec = self.out.named(ref, "swap"), self.out.local_spec(ref)
        if name not in self.out.made:
            self.out.made.add(name)
            dim = len(spec.shape) - 2  # the rows, of masks too
            args = (now, self.out.axis, dim, self.stay, self.go, self.out.rank)
            self.out.nodes.append(Node(name, SWAP, args, (), (self.spec(spec, dim),)))
        return Ref(name)
