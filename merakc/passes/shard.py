"""Tensor parallelism as a decision: which dims of which values are split over the tp axis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from merakc.ir.graph import Graph, InputKind, Node, Ref, TensorSpec
from merakc.ir.layout import Layout
from merakc.passes.choose import choose, factors_of
from merakc.passes.dims import Dims
from merakc.passes.factors import Factor, atoms, layout
from merakc.passes.propagate import propagate


@dataclass(frozen=True)
class Sharding:
    """Which dims of which values are split over tp; the same on every rank.

    `partial` names the nodes whose results are partial sums. `opaque` are the nodes without a
    rule, kept whole.
    """

    tp: int
    layouts: Mapping[Ref, Layout]
    partial: frozenset[str]
    opaque: tuple[Node, ...]

    def local_spec(self, ref: Ref, spec: TensorSpec, rank: int) -> TensorSpec:
        """The spec of tp rank `rank`'s part of a value."""
        return TensorSpec(self.layouts[ref].local_shape(self.tp, rank), spec.dtype)

    def splits(self, graph: Graph) -> dict[str, Layout]:
        """The layouts of the split parameters and buffers, by the user's names."""
        kinds = (InputKind.PARAMETER, InputKind.BUFFER)
        found = {i.target: self.layouts[Ref(i.name)] for i in graph.inputs if i.kind in kinds}
        return {name: lay for name, lay in found.items() if lay.is_split}

    def whole_ops(self, graph: Graph) -> tuple[str, ...]:
        """The ops on trained values that each rank computes whole for want of a rule, by line."""
        grads = graph.grad_values()
        trained = [n for n in self.opaque if not grads.isdisjoint(n.refs)]
        return tuple(dict.fromkeys(f"{n.op} at {n.source}" for n in trained))


def shard(graph: Graph, tp: int, splits: Mapping[str, Layout] | None = None) -> Sharding:
    """Decides how the graph's values are split over `tp` ranks.

    With `splits`, those parameters and buffers are split as given (a plan's decision), and
    everything else follows from them. Raises `ShardError` where nothing can be split.
    """
    dims = propagate(graph)
    chosen = choose(dims, tp) if splits is None else factors_of(dims, splits)
    return sharding_of(dims, chosen, tp)


def sharding_of(dims: Dims, chosen: set[Factor], tp: int) -> Sharding:
    """The layouts of all values once it is decided which factors are split."""
    layouts = {ref: layout(own, dims.shapes[ref], chosen) for ref, own in dims.of.items()}
    partial = frozenset(
        name
        for name, summed in dims.summed.items()
        if any(f in chosen for dim in summed for f in atoms(dim))
    )
    return Sharding(tp, layouts, partial, tuple(dims.opaque))
