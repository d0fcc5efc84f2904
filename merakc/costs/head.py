"""What coupling the samples of a batch costs: seconds of the head, bytes of it and of its waist."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from merakc.costs.buckets import mesh_fabric
from merakc.costs.device import place_on
from merakc.costs.fabric import all_gather_seconds, axis_group
from merakc.costs.nodes import graph_seconds
from merakc.costs.work.memory import order_bytes
from merakc.ir.batches import BatchLayout, Head, Share, ShareKind
from merakc.ir.costs import StageCost
from merakc.ir.program import ActionKind, Mesh, StageGraphs
from merakc.machines.cluster import Cluster, Device

ORDER = (ActionKind.FORWARD, ActionKind.BACKWARD)


@dataclass(frozen=True, slots=True)
class HeadBytes:
    """What the head does to the memory of a rank.

    `peak_bytes` is its highest point over what was alive before, what the rank's micro-batches have
    handed over included there. It leaves the `tangents` of every micro-batch, by name; those in
    `shared` are the same for all.
    """

    peak_bytes: int
    tangents: Mapping[str, int]
    shared: frozenset[str]

    def per_micro_batch(self, count: int) -> int:
        """What it leaves for each of so many micro-batches."""
        own = sum(size for name, size in self.tangents.items() if name not in self.shared)
        return own + sum(self.tangents[name] for name in self.shared) // count


def even_layout(mesh: Mesh, micro_batches: int) -> BatchLayout:
    """Parts that are all alike."""
    return BatchLayout((micro_batches,) * mesh.dp, micro_batches)


def head_bytes(head: Head, chunk: StageGraphs, layout: BatchLayout) -> HeadBytes:
    """The bytes of a head from its own graphs, for parts that lie like this."""
    order = ORDER[: 1 + (chunk.backward is not None)]
    forward, *backward = order_bytes(chunk, order)
    running = head.size_bytes + forward.peak_bytes
    gradients = {o.name for o in chunk.backward.outputs} if chunk.backward else set()
    for after in backward:
        running = max(running, forward.held_bytes + after.peak_bytes)
    of_parts = sum(layout.micro_batches * _part_bytes(s, layout) for s in head.waist)
    trained = [s for s in head.waist if s.name in gradients]
    tangents = {s.name: _part_bytes(s, layout) for s in trained}
    handed = sum(s.spec.size_bytes for s in trained) + layout.micro_batches * sum(
        tangents[s.name] for s in trained if s.kind is ShareKind.ROWS
    )
    peaks = [running, handed]
    if len(layout.sizes) > 1:  # the message that comes, and what is made of it
        peaks.append(2 * head.size_bytes + of_parts)
    shared = frozenset(s.name for s in trained if s.kind is not ShareKind.ROWS)
    return HeadBytes(max(max(peaks) - of_parts, 0), tangents, shared)


def _part_bytes(share: Share, layout: BatchLayout) -> int:
    """Of the value of one micro-batch."""
    whole = share.spec.size_bytes
    return round(whole * layout.share) if share.kind is ShareKind.ROWS else whole


def gathered_bytes(head: Head, dp: int) -> int:
    """What every dp rank has once it has the waist of all, of sums that of each rank."""
    return sum(
        s.spec.size_bytes * (dp if s.kind is ShareKind.SUM else 1)
        for s in head.waist
        if s.kind is not ShareKind.CONSTANT
    )


def gather_seconds(head: Head, mesh: Mesh, cluster: Cluster) -> float:
    """Seconds of bringing the waist of all dp ranks to each: one all-gather."""
    fabric = mesh_fabric(mesh, cluster)
    group = axis_group(mesh.dp, mesh.dp_stride, fabric)
    return all_gather_seconds(gathered_bytes(head, mesh.dp), group, fabric)


def with_head(
    cost: StageCost,
    head: Head,
    chunk: StageGraphs,
    layout: BatchLayout,
    mesh: Mesh,
    cluster: Cluster,
    device: Device | None = None,
) -> StageCost:
    """The cost of the stage that runs the head, from the head's own graphs."""
    place = place_on(cluster, mesh.tp, device, cp=mesh.cp)
    seconds = graph_seconds(chunk.forward, place, place.factors.forward)
    if chunk.backward is not None:
        seconds += graph_seconds(chunk.backward, place, place.factors.backward)
    found = head_bytes(head, chunk, layout)
    return replace(
        cost,
        head_s=seconds + gather_seconds(head, mesh, cluster),
        head_peak_bytes=found.peak_bytes,
        tangent_bytes=found.per_micro_batch(layout.micro_batches),
    )
