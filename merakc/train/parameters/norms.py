"""Numbers over whole tensors, from what each rank holds of them: every element counts once."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterable, Mapping
from weakref import ref

import torch
import torch.distributed as dist

from merakc.errors import ConfigError
from merakc.runtime.groups import Groups, ShardGroups
from merakc.runtime.health.facts import ALL
from merakc.runtime.health.job import call
from merakc.runtime.sharded_state import ShardedState
from merakc.runtime.state import Placement

INFINITE = float("inf")
CALL = "a norm, or another number, of gradients"
# What a rank gives that has no number, by how numbers of ranks are combined.
NOTHING = {"sum": 0.0, "max": -INFINITE, "min": INFINITE}
Combine = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
_PAIRS: dict[str, Combine] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}


def kept_by_its_model(sharded: ShardedState | None) -> Callable[[], ShardedState | None]:
    """The buckets, for what lives as long as parameters or their gradients: it must not keep them.

    Raises `ConfigError` where nobody has the model any more.
    """
    found = ref(sharded) if sharded is not None else None

    def state() -> ShardedState | None:
        if found is not None and found() is None:
            raise ConfigError(
                "an optimizer's step on parameters of a model that is gone: keep the model that "
                "auto_parallel returns for as long as its parameters are trained"
            )
        return found() if found is not None else None

    return state


class Owners:
    """Which rank's elements of a model's parameters count, and sums over the ranks of them."""

    def __init__(
        self,
        placements: Mapping[str, Placement],
        groups: Groups,
        sharded: ShardedState | None,
        device: torch.device,
    ) -> None:
        self.groups, self.device, self.sharded = groups, device, kept_by_its_model(sharded)
        self.placements = {n: p for n, p in placements.items() if p.is_parameter}
        self.place = {name: k for k, name in enumerate(self.placements)}
        _, pipeline_rank, lane = groups.coordinates
        self.held = {n for n, p in self.placements.items() if pipeline_rank in p.ranks}
        self.counted: dict[ShardGroups | None, list[str]] = {}
        if sharded is not None:
            self.counted = {bucket.groups: [] for bucket in sharded.buckets}
        for name, place in self.placements.items():
            lanes = place.sharers(groups.mesh).tp
            bucket, part = sharded.bucket_of.get(name) if sharded else None, lane % lanes
            # Of lanes that have the same, or the same sums of their parts, one is counted.
            is_first = bucket is not None or lane < lanes
            if is_first and place.owner == pipeline_rank and place.layout.holder(part) == part:
                self.counted.setdefault(bucket.groups if bucket else None, []).append(name)

    def total(self, own: Mapping[str, torch.Tensor], combine: str) -> torch.Tensor:
        """One number, float64, of this rank's numbers by parameter; every rank must call it."""
        nothing = NOTHING[combine]

        def joined(names: Iterable[str]) -> torch.Tensor:
            found = [own[n].to(self.device, torch.float64) for n in names if n in own]
            if not found:
                return torch.full((), nothing, dtype=torch.float64, device=self.device)
            stacked = torch.stack(found)
            return stacked.sum() if combine == "sum" else getattr(stacked, combine)()

        return self._over_ranks(own, joined, combine)

    def each(self, own: Mapping[str, torch.Tensor], combine: str) -> torch.Tensor:
        """A number for each parameter of the model, float64, in the order of `place`; every rank
        must call it.
        """
        nothing = NOTHING[combine]

        def placed(names: Iterable[str]) -> torch.Tensor:
            found = torch.full((len(self.place),), nothing, dtype=torch.float64, device=self.device)
            for name in names:
                if name in own:
                    found[self.place[name]] = own[name]
            return found

        return self._over_ranks(own, placed, combine)

    def _over_ranks(
        self, names: Collection[str], make: Callable[[Iterable[str]], torch.Tensor], combine: str
    ) -> torch.Tensor:
        """What each rank makes of the parameters that it counts, over those that share them, then
        over the model. `names` are all that the number is of.
        """
        found = make(())
        with call(CALL, {ALL: _fact(names, combine)}):
            for shards, names in self.counted.items():
                part = _over_group(make(names), shards.block if shards else None, combine)
                if shards is None or self.groups.coordinates[2] < shards.mesh.tp:
                    found = _PAIRS[combine](found, part)
            return _over_group(found, self.groups.axis("model"), combine)


def _fact(names: Collection[str], combine: str) -> str:
    """Which number it is, for people, and the same on all ranks that mean the same one."""
    of = next(iter(names), "nothing")
    if len(names) > 1:
        crc = zlib.crc32(" ".join(names).encode())
        of = f"{len(names)} parameters from {of} on (mark {crc:x})"
    return f"{CALL} ({combine} over ranks, of {of})"


def _over_group(own: torch.Tensor, group: dist.ProcessGroup | None, combine: str) -> torch.Tensor:
    """The numbers of a group's ranks, combined; NaN where one is, which backends let go of."""
    if group is None:
        return own
    if combine == "sum":
        dist.all_reduce(own, group=group)
        return own
    sign = 1.0 if combine == "max" else -1.0
    both = torch.stack(
        [torch.where(own.isnan(), -sign * INFINITE, own) * sign, own.isnan().double()]
    )
    dist.all_reduce(both, dist.ReduceOp.MAX, group=group)
    return torch.where(both[1] > 0, torch.nan, both[0] * sign)


def total_norm(
    owners: Owners, gradients: Mapping[str, torch.Tensor], norm_type: float
) -> torch.Tensor:
    """The norm of the gradients of the whole model, float64. Every rank must call it."""
    infinite = norm_type == float("inf")
    own = {
        name: torch.linalg.vector_norm(g, norm_type).double() if g.numel() else g.new_zeros(())
        for name, g in gradients.items()
    }
    with call("model.clip_grad_norm_"):
        if infinite:
            return owners.total(own, "max").clamp(min=0.0)
        powers = {n: v.pow(norm_type) for n, v in own.items()}
        return owners.total(powers, "sum").pow(1 / norm_type)
