"""Parameters and buffers: onto the ranks that hold them, and back together on rank 0."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from zlib_ng import zlib_ng

from merakc.files.elements import bytes_of
from merakc.ir.layout import Layout
from merakc.ir.program import Mesh
from merakc.runtime.groups import Groups, reduce_tensors
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

    def sharers(self, mesh: Mesh) -> Mesh:
        """The grid as it sees it, with as many ranks of tp as it has parts."""
        return mesh.sharers(of_experts=mesh.is_of_experts(self.layout))

    @property
    def owner(self) -> int:
        """The rank whose copy counts where one is needed: once in a norm, for the whole model."""
        return self.ranks[0]


@dataclass(frozen=True, slots=True)
class Pieces:
    """Tensors by their names, and what makes all of them; collective where they are sharded."""

    names: Sequence[str]
    make: Callable[[], Tensors]


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """SHA-256 of the elements' bytes, in order."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(bytes_of(tensor).numpy().tobytes())
    return found.hexdigest()


def crc_of(tensor: torch.Tensor, crc: int = 0) -> int:
    """The CRC-32 of a tensor's elements in row-major order, behind those of which `crc` is."""
    return zlib_ng.crc32(bytes_of(tensor).numpy(), crc)


def joined(
    local: Mapping[str, torch.Tensor],
    placements: Mapping[str, Placement],
    name: str,
    groups: Groups,
) -> torch.Tensor:
    """A tensor that this pipeline rank holds, whole, on each of its lanes. Collective."""
    own, layout = local[name], placements[name].layout
    group = groups.of_weight(layout)
    if group is None or not layout.is_split:
        return own
    parts: list[torch.Tensor] = []
    ranks = dist.get_process_group_ranks(group)
    for part, rank in enumerate(ranks):
        if layout.holder(part) < part:
            parts.append(parts[layout.holder(part)])
            continue
        shape = layout.local_shape(len(ranks), part)
        parts.append(own.contiguous() if rank == groups.rank else own.new_empty(shape))
        dist.broadcast(parts[-1], rank, group=group)
    return layout.join(parts)


def gather_full(
    local: Tensors,
    made: Sequence[Pieces],
    placements: Mapping[str, Placement],
    mesh: Mesh,
    rank: int,
) -> Tensors:
    """The whole tensors by name, on the CPU of rank 0, and {} on the other ranks. Collective.

    `local` has this rank's parts, but for those that are `made`, some at a time, on all dp ranks of
    a stage in the same order; a name that no owner holds is left out. Only the first of the ranks
    that share their state sends.
    """
    rest = local.keys() - {name for pieces in made for name in pieces.names}
    every = [*made, *(Pieces([n], lambda n=n: {n: local[n]}) for n in sorted(rest))]  # type: ignore[misc]
    _, pipeline_rank, lane = mesh.coordinates(rank)
    own = [[n for n in p.names if placements[n].owner == pipeline_rank] for p in every]
    order = [name for names in own for name in names]
    everyone = [order]
    if mesh.world_size > 1:
        everyone = [[] for _ in range(mesh.world_size)]
        dist.all_gather_object(everyone, order, all_ranks())
    found: Tensors = {}
    for names, pieces in zip(own, every, strict=True):
        parts = pieces.make()
        for name in names:
            place = placements[name]
            sharers = place.sharers(mesh)
            if rank == 0:
                found[name] = _received(name, 0, parts[name], place, mesh)
            elif sharers.state_rank(rank) == 0 and place.layout.holder(lane) == lane:
                dist.send(parts[name].detach().cpu().contiguous(), 0, all_ranks())
        del parts
    if rank == 0:
        for other in range(1, mesh.pp):
            for name in everyone[mesh.rank(0, other, 0)]:
                found[name] = _received(name, other, None, placements[name], mesh)
    return found


def _received(
    name: str, pipeline_rank: int, own: torch.Tensor | None, place: Placement, mesh: Mesh
) -> torch.Tensor:
    """A whole tensor on rank 0, memory of its own, from the lanes of its owner."""
    parts = [] if own is None else [own.detach().cpu()]
    ranks = place.sharers(mesh).tp
    for t in range(len(parts), ranks if place.layout.is_split else 1):
        if place.layout.holder(t) < t:
            parts.append(parts[place.layout.holder(t)])
            continue
        part = torch.empty(place.layout.local_shape(ranks, t), dtype=place.dtype)
        dist.recv(part, mesh.rank(0, pipeline_rank, t), all_ranks())
        parts.append(part)
    joined = place.layout.join(parts)
    return joined.clone() if own is not None and len(parts) == 1 else joined


def tied_reducer(
    placements: Mapping[str, Placement],
    groups: Groups,
    wanted: Collection[str],
    device: torch.device,
) -> Callable[[Tensors], None]:
    """Sums the gradients of a tied parameter over the ranks that share it, of those `wanted`."""
    own = groups.coordinates[1]
    tied: list[tuple[dist.ProcessGroup, list[str]]] = []
    for ranks in sorted({p.ranks for p in placements.values() if len(p.ranks) > 1}):
        group = groups.holders(ranks)  # all ranks make every group
        if group is not None and own in ranks:
            held = [n for n, p in placements.items() if p.ranks == ranks]
            tied.append((group, sorted(set(held).intersection(wanted))))

    def zeros(name: str) -> torch.Tensor:
        layout = placements[name].layout
        shape = layout.local_shape(groups.mesh.weight_ranks, groups.weight_rank)
        return torch.zeros(shape, dtype=placements[name].dtype, device=device)

    def reduce(gradients: Tensors) -> None:
        for group, names in tied:
            gradients |= {name: zeros(name) for name in names if name not in gradients}
            reduce_tensors([gradients[n] for n in names], group)

    return reduce
