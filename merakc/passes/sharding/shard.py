"""Decides how a graph is split over the tp axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from merakc.ir.graph import Graph
from merakc.ir.layout import Layout
from merakc.machines.cluster import NOMINAL_GPU, Cluster
from merakc.passes.sharding.choose import choose, factors_of
from merakc.passes.sharding.dims import Dims
from merakc.passes.sharding.factors import Factor, atoms, layout
from merakc.passes.sharding.layouts import Sharding
from merakc.passes.sharding.propagate import propagate
from merakc.passes.sharding.sequences.context import SequenceCut, cut_sequences, split_context
from merakc.passes.sharding.sequences.sequence import split_sequences


def shard(
    graph: Graph,
    tp: int,
    splits: Mapping[str, Layout] | None = None,
    *,
    cluster: Cluster = NOMINAL_GPU,
    sequence_parallel: bool = False,
    cp: int = 1,
    expert_parallel: bool = False,
    expert_load: Sequence[float] = (),
) -> Sharding:
    """Decides how the graph's values are split over `tp` ranks of a cluster, for each of `cp`.

    With `splits`, tp splits those parameters and buffers as given (a plan's decision), and
    everything else follows from them. With `sequence_parallel`, what would be computed alike on
    all ranks is computed on parts of sequences. Of the ranks of cp each computes on a part of every
    sequence, with the same parameters, but for those of experts with `expert_parallel`, to which
    rows go in the shares of `expert_load`. Raises `ShardError` where nothing can be split.
    """
    dims = graph.told(propagate)
    context = None
    if cp > 1:
        cut = graph.told(_cut_sequences, cp, expert_parallel)
        context = split_context(cut, expert_load if expert_parallel else None, tp=tp)
    if tp == 1 and context is not None:
        return replace(sharding_of(dims, set(), 1), context=context)
    chosen = choose(dims, tp, cluster) if splits is None else factors_of(dims, splits)
    sharding = sharding_of(dims, chosen, tp)
    if context is not None and expert_parallel:
        own = {ref: lay.beside(sharding.layouts[ref]) for ref, lay in context.layouts.items()}
        context = replace(context, layouts=own)
    sharding = replace(sharding, context=context)
    return split_sequences(dims, sharding, chosen) if sequence_parallel else sharding


def _cut_sequences(graph: Graph, cp: int, expert_parallel: bool) -> SequenceCut:
    """The sequences of a graph over `cp` ranks: whatever tp is, the same."""
    dims = graph.told(propagate)
    return cut_sequences(dims, sharding_of(dims, set(), cp), sends=expert_parallel)


def sharding_of(dims: Dims, chosen: set[Factor], tp: int) -> Sharding:
    """The layouts of all values once it is decided which factors are split."""
    layouts = {ref: layout(own, dims.shapes[ref], chosen) for ref, own in dims.of.items()}
    partial = frozenset(
        name
        for name, summed in dims.summed.items()
        if any(f in chosen for dim in summed for f in atoms(dim))
    )
    return Sharding(tp, layouts, partial, tuple(dims.opaque))
