"""Whether ranks that hold the same elements of the model still have the same values in them.

What users do to weights on one rank alone (loading them, noise of another seed) no collective sees:
every rank goes on with weights of its own. So each step compares some elements of some parameters,
others at every step, in a message that is sent anyway: holders add multiples of their values that
cancel out where these are equal. So it is with buffers, but for those that forwards write.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import torch

from merakc.errors import MismatchError
from merakc.runtime.groups import Groups
from merakc.runtime.part import plain
from merakc.runtime.sharded_state import ShardedState
from merakc.runtime.shards import Bucket
from merakc.runtime.state import Placement

TENSORS, ELEMENTS = 2, 16  # of each, that a step compares
# Of the values' size. Ranks that compute the same round alike, or nearly so.
BOUND = 1e-2


class Replicas:
    """Of one rank's `state`; `written` are the buffers that forwards write, on any rank."""

    def __init__(
        self,
        placements: Mapping[str, Placement],
        groups: Groups,
        state: Mapping[str, torch.Tensor],
        sharded: ShardedState | None,
        written: Collection[str] = (),
    ) -> None:
        mesh = groups.mesh  # of tensors that all ranks hold parts of there is nothing to compare
        self.names = [
            name for name, place in sorted(placements.items())
            if (sharers := place.sharers(mesh)).state_ranks > 1 or len(place.ranks) > 1
            or place.layout.copies(sharers.tp) > 1
        ]  # fmt: skip
        self.state, self.written, self.factors = state, written, dict[str, int]()
        pipeline_rank = groups.coordinates[1]
        bucket_of = sharded.bucket_of if sharded else {}
        for name in self.names:
            place, bucket = placements[name], bucket_of.get(name)
            if pipeline_rank not in place.ranks:
                continue
            shards = bucket.groups.shards.optimizer if bucket else 1
            sharers = place.sharers(mesh)
            along_tp, own = place.layout.copies(sharers.tp), groups.coordinates[2] % sharers.tp
            if shards > 1 and bucket is not None and not _even(bucket, placements, sharers.tp):
                along_tp = 1  # each has a shard of other elements
            holders = len(place.ranks) * along_tp * (sharers.state_ranks // shards)
            is_first = pipeline_rank == place.owner and sharers.state_rank(groups.rank) < shards
            is_first = is_first and (along_tp == 1 or place.layout.holder(own) == own)
            if holders > 1:
                self.factors[name] = holders - 1 if is_first else -1

    def _named(self, step: int) -> list[str]:
        names = [name for name in self.names if name not in self.written]
        count = min(TENSORS, len(names))
        return [names[(step * count + k) % len(names)] for k in range(count)]

    @torch.no_grad()
    def marks(self, step: int) -> torch.Tensor:
        """What this rank adds at a step: float64, of the same number of elements on every rank."""
        names = self._named(step)
        found = torch.zeros(len(names), ELEMENTS + 1, dtype=torch.float64)
        for k, name in enumerate(names):
            factor = self.factors.get(name)
            if factor is not None:
                flat = plain(self.state[name]).detach().reshape(-1)
                flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
                at = step * ELEMENTS % flat.numel() if flat.numel() else 0
                some = flat[at : at + ELEMENTS].double()
                some = factor * some.nan_to_num(nan=1, posinf=1, neginf=-1)  # so masks are, too
                found = found.to(some.device)
                found[k, : some.numel()], found[k, -1] = some, some.abs().sum()
        return found.view(-1)

    def look(self, step: int, sums: Sequence[float]) -> None:
        """Raises `MismatchError`, on every rank, where the sums of marks say that values differ."""
        for k, name in enumerate(self._named(step)):
            *left, size = sums[k * (ELEMENTS + 1) : (k + 1) * (ELEMENTS + 1)]
            if sum(map(abs, left)) > BOUND * size:
                raise MismatchError(
                    f"ranks that hold the same elements of '{name}' have other values in them: "
                    "something has changed weights or buffers on some ranks alone, or otherwise "
                    "than on others; load, initialise and change weights on all ranks alike, with "
                    "random numbers of one seed"
                )


def _even(bucket: Bucket, placements: Mapping[str, Placement], parts: int) -> bool:
    """Whether a bucket has as many elements of each tensor on all ranks that split weights, so that
    its shards lie alike.
    """
    return all(
        len({math.prod(placements[name].layout.local_shape(parts, r)) for r in range(parts)}) == 1
        for name in bucket.members
    )
