"""Decides how a graph is split over the tp axis."""

from __future__ import annotations

from collections.abc import Mapping

from merakc.ir.graph import Graph
from merakc.ir.layout import Layout
from merakc.machines.cluster import NOMINAL_GPU, Cluster
from merakc.passes.sharding.choose import choose, factors_of
from merakc.passes.sharding.context import split_context
from merakc.passes.sharding.dims import Dims
from merakc.passes.sharding.factors import Factor, atoms, layout
from merakc.passes.sharding.layouts import Sharding
from merakc.passes.sharding.propagate import propagate
from merakc.passes.sharding.sequence import split_sequences


def shard(
    graph: Graph,
    tp: int,
    splits: Mapping[str, Layout] | None = None,
    *,
    cluster: Cluster = NOMINAL_GPU,
    sequence_parallel: bool = False,
    context_parallel: bool = False,
    expert_parallel: bool = False,
) -> Sharding:
    """Decides how the graph's values are split over `tp` ranks of a cluster.

    With `splits`, those parameters and buffers are split as given (a plan's decision), and
    everything else follows from them. With `sequence_parallel`, what would be computed alike on
    all ranks is computed on parts of sequences. With `context_parallel` everything is, and no
    parameter is split; with `expert_parallel` too, those of experts. Raises `ShardError` where
    nothing can be split.
    """
    dims = propagate(graph)
    if context_parallel and tp > 1:
        return split_context(dims, sharding_of(dims, set(), tp), experts=expert_parallel)
    chosen = choose(dims, tp, cluster) if splits is None else factors_of(dims, splits)
    sharding = sharding_of(dims, chosen, tp)
    return split_sequences(dims, sharding, chosen) if sequence_parallel else sharding


def sharding_of(dims: Dims, chosen: set[Factor], tp: int) -> Sharding:
    """The layouts of all values once it is decided which factors are split."""
    layouts = {ref: layout(own, dims.shapes[ref], chosen) for ref, own in dims.of.items()}
    partial = frozenset(
        name
        for name, summed in dims.summed.items()
        if any(f in chosen for dim in summed for f in atoms(dim))
    )
    return Sharding(tp, layouts, partial, tuple(dims.opaque))
