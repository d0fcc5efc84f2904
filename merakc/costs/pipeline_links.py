"""The links that the ranks of a pipeline exchange messages over: inside a node, and between two."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from merakc.ir.program import Mesh
from merakc.machines.cluster import Cluster
from merakc.machines.links import Link


@dataclass(frozen=True, slots=True)
class PipelineLinks:
    """`near` joins the devices of a node; `far` those of others, which pairs of pipeline ranks are
    that are `crossing`, in some replica of the model.
    """

    near: Link
    far: Link
    crossing: frozenset[tuple[int, int]]

    def between(self, one: int, other: int) -> Link:
        """What joins two pipeline ranks."""
        return self.far if (one, other) in self.crossing else self.near


def pipeline_links(mesh: Mesh, cluster: Cluster) -> PipelineLinks:
    """Those of a mesh on a cluster: one link, where that says nothing of nodes."""
    apart = mesh.pp_stride + 1
    if cluster.hardware is None:
        link = Link(cluster.link_latency_s, cluster.link_bytes_per_s)
        return PipelineLinks(link, link, frozenset())
    per_node = cluster.hardware.nodes[0].devices
    near, far = (
        Link(c.link_latency_s, c.link_bytes_per_s)
        for c in (cluster.joining(min(apart, per_node)), cluster.joining(max(apart, per_node + 1)))
    )
    return PipelineLinks(near, far, crossing(mesh, per_node))


@lru_cache(maxsize=1 << 12)
def crossing(mesh: Mesh, per_node: int) -> frozenset[tuple[int, int]]:
    """The pairs of pipeline ranks of which, with the same places on the other axes, some are on
    different nodes of so many devices.
    """
    starts = {dp * mesh.dp_stride % per_node for dp in range(min(mesh.dp, per_node))}
    nodes = [
        tuple((start + pp * mesh.pp_stride + lane) // per_node for start in starts
              for lane in range(mesh.lanes))
        for pp in range(mesh.pp)
    ]  # fmt: skip
    pairs = ((a, b) for a in range(mesh.pp) for b in range(mesh.pp))
    return frozenset((a, b) for a, b in pairs if nodes[a] != nodes[b])
