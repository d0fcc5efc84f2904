"""Parameters and buffers: onto the ranks that hold them, and back together on rank 0."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from merakc.ir.layout import Layout
from merakc.ir.program import Mesh
from merakc.runtime.groups import Groups
from merakc.runtime.health.job import all_ranks

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one parameter or buffer lives: its layout over tp, the stages that read it, and the
    pipeline ranks that hold it.
    """

    layout: Layout
    dtype: torch.dtype
    stages: tuple[int, ...]
    ranks: tuple[int, ...]
    is_parameter: bool
    requires_grad: bool

    @property
    def owner(self) -> int:
        """The rank whose copy counts where one is needed: once in a norm, for the whole model."""
        return self.ranks[0]


def same_everywhere(tensors: Sequence[torch.Tensor]) -> None:
    """Gives all ranks rank 0's values, as DistributedDataParallel does; nothing moves if equal."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    digests: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(digests, digest(tensors), all_ranks())
    if len(set(digests)) > 1:
        for tensor in tensors:
            dist.broadcast(tensor.detach(), 0, all_ranks())


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """SHA-256 of the elements' bytes, in order."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def joined(
    local: Mapping[str, torch.Tensor],
    placements: Mapping[str, Placement],
    name: str,
    groups: Groups,
) -> torch.Tensor:
    """A tensor that this pipeline rank holds, whole, on each of its tp ranks. Collective."""
    own, layout, group = local[name], placements[name].layout, groups.axis("tp")
    if group is None or not layout.is_split:
        return own
    (dp, pipeline_rank, rank), mesh = groups.coordinates, groups.mesh
    parts = []
    for tp in range(mesh.tp):
        shape = layout.local_shape(mesh.tp, tp)
        parts.append(own.contiguous() if tp == rank else own.new_empty(shape))
        dist.broadcast(parts[-1], mesh.rank(dp, pipeline_rank, tp), group=group)
    return layout.join(parts)


def gather_full(
    local: Mapping[str, torch.Tensor],
    placements: Mapping[str, Placement],
    mesh: Mesh,
    rank: int,
) -> Tensors:
    """The whole tensors by name, on the CPU of rank 0, and {} on the other ranks. Collective.

    `local` holds this rank's parts; a name that no owner holds is left out. Only dp rank 0 sends.
    """
    dp, pipeline_rank, _ = mesh.coordinates(rank)
    owned = {n for n, p in placements.items() if p.owner == pipeline_rank}
    own = {n for n in owned if dp == 0 and n in local}
    present = [own]
    if mesh.world_size > 1:
        present = [set() for _ in range(mesh.world_size)]
        dist.all_gather_object(present, own, all_ranks())
    found: Tensors = {}
    for name, place in placements.items():
        holders = [mesh.rank(0, place.owner, t) for t in range(mesh.tp)]
        if name not in present[holders[0]]:
            continue
        if not place.layout.is_split:
            holders = holders[:1]
        if rank == 0:
            parts = []
            for t, holder in enumerate(holders):
                if holder == 0:
                    parts.append(local[name].detach().cpu())
                    continue
                shape = place.layout.local_shape(mesh.tp, t)
                part = torch.empty(shape, dtype=place.dtype)
                dist.recv(part, holder, all_ranks())
                parts.append(part)
            found[name] = place.layout.join(parts).clone()
        elif rank in holders:
            dist.send(local[name].detach().cpu().contiguous(), 0, all_ranks())
    return found
