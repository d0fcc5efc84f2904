"""Parameters, gradients and optimizer state in shards over dp, each in as many as a plan says.

Parameters stand one behind the other in buckets, flat buffers that are padded to be cut evenly. A
rank keeps its shard of a bucket's parameters and, inside that, its shard of what the optimizer
updates: `owned` are flat views of the latter, one a parameter, some of them empty. Elementwise
optimizers update them as they would the whole.

With s_p, s_g and s_os shards (AMSP, arXiv 2311.00257) the dp ranks are blocks of s_os neighbours.
Rank i of a block has shard i mod s_p of the parameters, so that gathering them stays among
neighbours; its part of that shard, i div s_p, is what it optimizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from merakc.ir.state import StateShards
from merakc.runtime.groups import BUCKET_BYTES, Groups

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Member:
    """A parameter's place in a bucket, in elements."""

    name: str
    shape: torch.Size
    start: int

    @property
    def stop(self) -> int:
        """Where it ends."""
        return self.start + self.shape.numel()

    def part(self, flat: torch.Tensor, offset: int) -> torch.Tensor:
        """Its elements in a piece of the bucket that begins at `offset`; flat, perhaps empty."""
        last = offset + flat.numel()
        start, stop = (min(max(at, offset), last) - offset for at in (self.start, self.stop))
        return flat[start:stop]


class ShardGroups:
    """The process groups of one rank's shards, and its place in them. All ranks make it at once."""

    def __init__(self, groups: Groups, shards: StateShards) -> None:
        shards.check(groups.mesh.dp)
        self.shards, self.groups = shards, groups
        self.dp = groups.coordinates[0]
        within = self.dp % shards.optimizer
        self.parameter_index = within % shards.parameters
        inner = shards.optimizer // shards.parameters
        self.owned_index = self.parameter_index * inner + within // shards.parameters
        s_p, s_os = shards.parameters, shards.optimizer
        self.gather = self._make(lambda dp: (dp // s_p,))
        self.refresh = self._make(lambda dp: (dp // s_os, dp % s_p))
        self.block = self._make(lambda dp: (dp // s_os,))
        self.replicas = self._make(lambda dp: (dp % s_os,))

    def _make(self, key: Callable[[int], tuple[int, ...]]) -> dist.ProcessGroup | None:
        """The groups of dp ranks that share a key, along every other axis of the mesh."""
        mesh = self.groups.mesh
        families: dict[tuple[int, ...], list[int]] = {}
        for rank in range(mesh.world_size):
            dp, pp, tp = mesh.coordinates(rank)
            families.setdefault((pp, tp, *key(dp)), []).append(rank)
        return self.groups.group(families.values())


class Bucket:
    """Some parameters of one dtype, on one rank.

    `kept` is the rank's shard of them, a view of which is `master`, the shard that it optimizes;
    `owned` are the parameters' parts of the latter.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], groups: ShardGroups) -> None:
        self.groups, shards = groups, groups.shards
        self.members: list[Member] = []
        total = 0
        for name, tensor in tensors.items():
            self.members.append(Member(name, tensor.shape, total))
            total += tensor.numel()
        self.numel = math.ceil(total / shards.optimizer) * shards.optimizer
        first = next(iter(tensors.values()))
        flat = first.new_zeros(self.numel)
        for member in self.members:
            member.part(flat, 0).copy_(tensors[member.name].detach().reshape(-1))
        size, self.owned_size = self.numel // shards.parameters, self.numel // shards.optimizer
        kept_at, self.owned_at = (
            groups.parameter_index * size,
            groups.owned_index * self.owned_size,
        )
        self.kept = flat if shards.parameters == 1 else flat[kept_at : kept_at + size].clone()
        self.master = self.kept[self.owned_at - kept_at :][: self.owned_size]
        self.owned = {
            m.name: nn.Parameter(m.part(self.master, self.owned_at)) for m in self.members
        }
        self.gradient: torch.Tensor | None = None  # the rank's shard, summed over micro-batches

    def refresh(self) -> None:
        """Brings what the optimizers of other ranks wrote into `kept`."""
        if self.groups.refresh is not None:
            all_gather(self.kept, self.master, self.groups.refresh)

    def gathered(self) -> Tensors:
        """The whole parameters; where they are kept whole, views of what is kept."""
        flat = self.kept
        if self.groups.gather is not None:
            flat = self.kept.new_empty(self.numel)
            all_gather(flat, self.kept, self.groups.gather)
        return {m.name: m.part(flat, 0).view(m.shape) for m in self.members}

    def add(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Adds the gradients of a micro-batch, which are scattered where gradients are sharded.

        A parameter without one counts as zeros.
        """
        flat = self.master.new_zeros(self.numel)
        for member in self.members:
            if member.name in gradients:
                member.part(flat, 0).copy_(gradients[member.name].reshape(-1))
        shards = self.groups.shards
        if shards.gradients == shards.parameters:
            flat = reduce_scatter(flat, self.groups.gather)
        elif self.groups.block is not None:
            parts = flat.view(shards.parameters, -1, self.owned_size)
            flat = reduce_scatter(parts.transpose(0, 1).reshape(-1), self.groups.block)
        self.gradient = flat if self.gradient is None else self.gradient.add_(flat)

    def reduced(self) -> Tensors:
        """The gradients of what this rank owns, summed over all dp ranks; then they are zero."""
        gradient, self.gradient = self.gradient, None
        assert gradient is not None, "no micro-batch has added its gradients"
        shards = self.groups.shards
        if shards.gradients != shards.optimizer:
            gradient = reduce_scatter(gradient, self.groups.refresh)
        if self.groups.replicas is not None:
            dist.all_reduce(gradient, group=self.groups.replicas)
        return {m.name: m.part(gradient, self.owned_at) for m in self.members}


def make_buckets(
    tensors: Mapping[str, torch.Tensor], groups: ShardGroups, bucket_bytes: int = BUCKET_BYTES
) -> list[Bucket]:
    """Buckets of about that size, the tensors in their order; a dtype begins a new one."""
    return [Bucket(part, groups) for part in _parts(tensors, bucket_bytes)]


def _parts(tensors: Mapping[str, torch.Tensor], bucket_bytes: int) -> Iterator[Tensors]:
    part: Tensors = {}
    held_bytes = 0
    for name, tensor in tensors.items():
        same = all(other.dtype == tensor.dtype for other in part.values())
        if part and not (same and held_bytes + tensor.nbytes <= bucket_bytes):
            yield part
            part, held_bytes = {}, 0
        part[name] = tensor
        held_bytes += tensor.nbytes
    if part:
        yield part


def all_gather(whole: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Fills `whole` with the parts of all ranks of the group; `own` may be a view of it."""
    _COLLECTIVES["gather"](whole, own, group=group)


def reduce_scatter(flat: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """This rank's part of the sum over the group. `flat` is written to.

    gloo's own takes twice the time of its all-reduce (16 MiB over four ranks of one machine: 131
    against 63 ms), of which the part is taken.
    """
    if group is None:
        return flat
    ranks = dist.get_world_size(group)
    own = flat.chunk(ranks)[dist.get_rank(group)]
    if dist.get_backend(group) == "gloo":
        dist.all_reduce(flat, group=group)
        return own.clone()
    out = torch.empty_like(own)
    _COLLECTIVES["scatter"](out, flat, group=group)
    return out


# torch 2.13 renames them; their old names warn there.
_COLLECTIVES: dict[str, Callable[..., object]] = {
    "gather": getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor,
    "scatter": getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor,
}
