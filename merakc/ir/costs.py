"""What the actions of a Program cost, per stage: seconds and bytes of one rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from merakc.ir.program import ActionKind, CollectiveKind, Mesh
from merakc.machines.cluster import Sharing
from merakc.machines.links import Link


class Effect(NamedTuple):
    """What a compute of one micro-batch does on its rank.

    `peak_bytes` is its highest point over what was alive before; `left_bytes` is what it leaves
    behind of activations: less than 0, it frees.
    """

    seconds: float
    peak_bytes: int
    left_bytes: int


@dataclass(frozen=True, slots=True)
class StageCost:
    """Costs of one stage on one tp rank. Seconds are of one micro-batch, tp collectives included.

    `reduce_s` is what adding up the gradients of parameters that other ranks hold too takes,
    `head_s` what couples the samples of the batch, once a step, with its collective over dp.

    `saved_bytes` live from the forward of a micro-batch to the end of its backward;
    `forward_peak_bytes` and `backward_peak_bytes` are what an action allocates at its highest
    point, over what was alive before it (what it leaves behind included); `static_bytes` are
    parameters, buffers, gradients and optimizer state, `reduced_bytes` what the gradients take more
    once they are reduced (less, where it is negative). Where a micro-batch is recomputed, the
    forward leaves `checkpoint_bytes` behind, and the recomputation makes them `saved_bytes`. Where
    the backward is split, `deferred_bytes` live from the input gradient to the weight gradient.
    `checkpoint_peak_bytes`, `recompute_peak_bytes`, `input_grad_peak_bytes` and `weight_peak_bytes`
    are the highest points of a forward that leaves a checkpoint, of a recomputation, and of an
    input and a weight gradient.

    What couples the samples reads `waist_bytes` of a micro-batch, beside those that it saves, and
    leaves it `tangent_bytes` until the end of its backward; `head_peak_bytes` is its highest point.

    Beside what it saves, a micro-batch has `host_bytes` on the host from its forward to the end of
    its backward, and `deferred_host_bytes` from the input gradient to the weight gradient. Its
    backward has `read_bytes` of parameters in use at once, where it makes blocks again.
    """

    forward_s: float
    backward_s: float
    input_grad_s: float = 0.0
    weight_grad_s: float = 0.0
    recompute_s: float = 0.0
    reduce_s: float = 0.0
    head_s: float = 0.0
    saved_bytes: int = 0
    checkpoint_bytes: int = 0
    deferred_bytes: int = 0
    forward_peak_bytes: int = 0
    backward_peak_bytes: int = 0
    checkpoint_peak_bytes: int = 0
    recompute_peak_bytes: int = 0
    input_grad_peak_bytes: int = 0
    weight_peak_bytes: int = 0
    static_bytes: int = 0
    reduced_bytes: int = 0
    waist_bytes: int = 0
    tangent_bytes: int = 0
    head_peak_bytes: int = 0
    host_bytes: int = 0
    deferred_host_bytes: int = 0
    read_bytes: int = 0

    @property
    def effects(self) -> tuple[Effect, ...]:
        """By kind of compute, in the order of `COMPUTES`; last, of a forward that leaves a
        checkpoint alone.
        """
        saved, deferred, checkpoint = self.saved_bytes, self.deferred_bytes, self.checkpoint_bytes
        return (
            Effect(self.forward_s, self.forward_peak_bytes, saved),
            Effect(self.backward_s, self.backward_peak_bytes, -saved),
            Effect(self.input_grad_s, self.input_grad_peak_bytes, deferred - saved),
            Effect(self.weight_grad_s, self.weight_peak_bytes, -deferred),
            Effect(self.recompute_s, self.recompute_peak_bytes, saved - checkpoint),
            Effect(self.forward_s, self.checkpoint_peak_bytes, checkpoint),
        )


@dataclass(frozen=True, slots=True)
class GraphCollective:
    """A collective inside a graph, with its times as shares of the graph's seconds.

    It is issued at `start` and ends at `end`; the rank stands still for it from `wait_start` to
    `wait_end`.
    """

    op: str
    axis: str
    size_bytes: int
    start: float
    end: float
    wait_start: float
    wait_end: float


# By stage, kind of compute, and whether it is a forward whose micro-batch is recomputed.
GraphCollectives = Mapping[tuple[int, ActionKind, bool], tuple[GraphCollective, ...]]


@dataclass(frozen=True, slots=True)
class CostTable:
    """Stage costs, the link between stages, and where the figures come from.

    Pairs of pipeline ranks of the `mesh` that are `crossing` from node to node are joined by `far`.
    `collective_s` are seconds of a bucket's collectives over dp, which run at the share `overlap`
    of their speed while the rank computes; what is `copied` from or to the host goes at all of it.
    `collectives` are those of the stages' graphs, whose seconds are in the stages' costs.

    `sharing` is what the ranks of a node share, of which there are `ranks` in all; seconds are then
    those of a rank that computes alone.
    """

    stages: tuple[StageCost, ...]
    p2p_latency_s: float
    p2p_bytes_per_s: float
    source: Literal["formula", "measured"] = "formula"
    collective_s: Mapping[tuple[str, CollectiveKind], float] = field(
        default_factory=dict, hash=False
    )
    overlap: float = 1.0
    copied: frozenset[tuple[str, CollectiveKind]] = frozenset()
    collectives: GraphCollectives = field(default_factory=dict, hash=False)
    sharing: Sharing | None = None
    ranks: int = 0
    far: Link | None = None
    crossing: frozenset[tuple[int, int]] = frozenset()
    mesh: Mesh | None = None

    def link(self, rank: int, peer: int) -> Link:
        """What joins two ranks of the pipeline."""
        if self.far is not None and self.mesh is not None:
            (_, one, _), (_, other, _) = map(self.mesh.coordinates, (rank, peer))
            if (one, other) in self.crossing:
                return self.far
        return Link(self.p2p_latency_s, self.p2p_bytes_per_s)
