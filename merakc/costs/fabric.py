"""Seconds of collectives on a cluster of nodes: fast links inside a node, a network between them.

The alpha-beta model (Hockney 1994; Thakur et al. 2005, section 3): a step of a collective takes a
latency and its bytes over the bandwidth. A ring over several nodes is as fast as its slowest link,
but only its steps from node to node take the network's latency, as NCCL's own tuner has it
(`src/graph/tuning.cc`). The groups of a node that communicate at once share the network of the
node.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from merakc.machines.cluster import Hardware
from merakc.machines.links import Link


@dataclass(frozen=True, slots=True)
class Fabric:
    """The links of a cluster.

    `local_bytes_per_s` is what one rank sends to others of its node, a direction;
    `network_bytes_per_s` what all ranks of a node together send to other nodes. Latencies are of
    one step of a collective. Gathers and reduce-scatters of tp reach `gather_share` of the local
    rate.
    """

    ranks_per_node: int
    local_bytes_per_s: float
    network_bytes_per_s: float
    local_latency_s: float
    network_latency_s: float
    gather_share: float = 1.0

    @property
    def by_cores(self) -> bool:
        """Whether the cores that compute put messages together and carry them, as over gloo."""
        return self.gather_share < 1.0


@dataclass(frozen=True, slots=True)
class Group:
    """The ranks of a collective: how many, how many of them a node, how many such groups a node."""

    size: int
    per_node: int = 1
    groups_per_node: int = 1

    @property
    def is_local(self) -> bool:
        """Whether all ranks are of one node."""
        return self.size <= self.per_node

    @property
    def nodes(self) -> int:
        """On how many nodes they are."""
        return -(-self.size // self.per_node)


def hardware_fabric(hardware: Hardware, ranks: int) -> Fabric:
    """The links that a job of so many neighbouring ranks uses: in a node, and the outermost level.

    Each at the share of its bandwidth that programs reach, and corrected by measured steps.
    """
    per_node = hardware.nodes[0].devices
    inner, outer = hardware.level(per_node), hardware.level(max(ranks, per_node))
    network = outer.bytes_per_s * per_node / outer.shared_by
    slower = hardware.factors.collectives
    share = hardware.link_share / slower
    return Fabric(
        per_node,
        share * inner.bytes_per_s / inner.shared_by,
        share * network,
        slower * inner.latency_s,
        slower * outer.latency_s,
        inner.gather_share,
    )


def axis_group(size: int, stride: int, fabric: Fabric) -> Group:
    """The ranks of an axis of `size` ranks that are `stride` apart."""
    return shard_group(size, 1, fabric, stride)


def message_seconds(size_bytes: float, fabric: Fabric, *, is_local: bool) -> float:
    """A message to a rank of the same node, or of another, while every rank of a node sends one."""
    pair = Group(2, 2 if is_local else 1, fabric.ranks_per_node)
    return _link(pair, fabric).seconds(size_bytes)


def shard_group(shards: int, before: int, fabric: Fabric, stride: int = 1) -> Group:
    """The group over which a tensor in `before` shards is brought into `shards` shards.

    Its members are `before * stride` ranks apart, with `stride` ranks between neighbours of the dp
    axis (tp ranks, which lie inside dp).
    """
    size, apart = shards // before, before * stride
    per_node = max(1, min(size, fabric.ranks_per_node // apart))
    return Group(size, per_node, max(1, fabric.ranks_per_node // per_node))


def all_gather_seconds(size_bytes: float, group: Group, fabric: Fabric) -> float:
    """A ring all-gather to, or a reduce-scatter of, `size_bytes` on every rank."""
    if group.size == 1:
        return 0.0
    between = group.nodes - 1
    inside = group.size - 1 - between
    latency_s = inside * fabric.local_latency_s + between * fabric.network_latency_s
    share = (group.size - 1) / group.size
    return latency_s + share * size_bytes / _link(group, fabric).bytes_per_s


def all_reduce_seconds(size_bytes: float, group: Group, fabric: Fabric) -> float:
    """An all-reduce of `size_bytes`: a ring, or a double tree where latency counts more.

    The tree is that of Sanders, Speck and Träff (2009), full bandwidth at a logarithmic latency: a
    tree of the nodes, and one inside each.
    """
    if group.size == 1:
        return 0.0
    inside = math.ceil(math.log2(min(group.size, group.per_node)))
    between = math.ceil(math.log2(group.nodes))
    latency_s = inside * fabric.local_latency_s + between * fabric.network_latency_s
    tree_s = 2 * (latency_s + size_bytes / _link(group, fabric).bytes_per_s)
    return min(2 * all_gather_seconds(size_bytes, group, fabric), tree_s)


def swap_seconds(size_bytes: float, group: Group, fabric: Fabric) -> float:
    """Messages of so many bytes between the ranks of a group that are as far from its ends: of
    several nodes, all of them leave their node.
    """
    return _link(_at_once(group), fabric).seconds(size_bytes) if group.size > 1 else 0.0


def all_to_all_seconds(size_bytes: float, group: Group, fabric: Fabric) -> float:
    """A tensor of `size_bytes` on each rank, of which every rank of the group gets an equal part.

    All ranks of a node send at once: what goes to others of the node through their own links, and
    beside it what goes to other nodes through the network of the node.
    """
    part_bytes, inside = size_bytes / group.size, min(group.size, group.per_node)
    here_s = (inside - 1) * part_bytes / fabric.local_bytes_per_s
    away_s = (group.size - inside) * part_bytes / _link(_at_once(group), fabric).bytes_per_s
    return all_gather_seconds(0, group, fabric) + max(here_s, away_s)


def _at_once(group: Group) -> Group:
    """As a group whose every rank sends to other nodes at once, where there are several."""
    return group if group.is_local else Group(group.size, 1, group.groups_per_node * group.per_node)


def _link(group: Group, fabric: Fabric) -> Link:
    """The slowest link that a rank of the group sends through."""
    if group.is_local:
        return Link(fabric.local_latency_s, fabric.local_bytes_per_s)
    share = fabric.network_bytes_per_s / group.groups_per_node
    return Link(fabric.network_latency_s, min(fabric.local_bytes_per_s, share))
