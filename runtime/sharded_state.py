"""The sharded parameters of a rank while steps run: fetched when a graph reads them, their
gradients reduced as soon as they are complete.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping

import torch

from merakc.runtime.groups import BUCKET_BYTES
from merakc.runtime.shards import Bucket, ShardGroups, make_buckets

Tensors = dict[str, torch.Tensor]
HELD = 2  # gathered buckets: the one that is read and the next


class ShardedState:
    """Parameters in buckets, each of the parameters of one stage in the order of their first use.

    `trained` are those that get a gradient in every micro-batch: a bucket is reduced when the last
    of its trained parameters has one.
    """

    def __init__(
        self,
        stages: Mapping[int, Mapping[str, torch.Tensor]],
        trained: Collection[str],
        groups: ShardGroups,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self.buckets = [
            bucket
            for tensors in stages.values()
            for bucket in make_buckets(tensors, groups, bucket_bytes)
        ]
        self.bucket_of = {name: b for b in self.buckets for name in b.members}
        self.wanted = {id(b): {n for n in b.members if n in trained} for b in self.buckets}
        self.last = False  # whether the gradients that come are those of the last micro-batch
        self.held: deque[tuple[Bucket, torch.Tensor]] = deque(maxlen=HELD)
        self.order: list[Bucket] = []  # of fetching in the last step
        self.place = 0

    @property
    def owned(self) -> dict[str, torch.nn.Parameter]:
        """What this rank optimizes, by the parameters' names."""
        return {name: p for bucket in self.buckets for name, p in bucket.owned.items()}

    def refresh(self) -> None:
        """Starts to bring in what all ranks' optimizers wrote."""
        self.held.clear()
        self.place = 0
        for bucket in self.buckets:
            bucket.start(bucket.refresh())

    def fetch(self, name: str) -> torch.Tensor:
        """A whole parameter; the next bucket is gathered while it is used."""
        bucket = self.bucket_of[name]
        whole = self._whole(bucket)
        if bucket.groups.gather is not None:
            self._prefetch(bucket)
        member = bucket.members[name]
        return member.part(whole, 0).view(member.shape)

    def _whole(self, bucket: Bucket) -> torch.Tensor:
        if bucket.groups.gather is None:
            bucket.finish()
            return bucket.kept
        for held, whole in self.held:
            if held is bucket:
                bucket.finish()
                return whole
        whole = self._start(bucket)
        bucket.finish()
        return whole

    def _start(self, bucket: Bucket) -> torch.Tensor:
        whole = bucket.kept.new_empty(bucket.numel)
        bucket.start(bucket.gather(whole))
        self.held.append((bucket, whole))
        return whole

    def _prefetch(self, bucket: Bucket) -> None:
        """Follows the order of the step before."""
        if self.place and self.order[self.place - 1] is bucket:
            return
        if self.place < len(self.order) and self.order[self.place] is bucket:
            self.place += 1
        else:
            self.order[self.place :] = [bucket]
            self.place += 1
        if self.place < len(self.order):
            following = self.order[self.place]
            if all(held is not following for held, _ in self.held):
                self._start(following)

    def sink(self, name: str, gradient: torch.Tensor) -> None:
        """Takes a micro-batch's gradient of a parameter."""
        bucket = self.bucket_of[name]
        bucket.add(name, gradient)
        if bucket.arrived >= self.wanted[id(bucket)]:
            bucket.start(bucket.reduce(last=self.last))

    def take_gradients(self) -> Tensors:
        """The gradients of what this rank owns, of the trained parameters."""
        found: Tensors = {}
        for bucket in self.buckets:
            wanted = self.wanted[id(bucket)]
            if wanted:
                found |= {n: g for n, g in bucket.take_gradients().items() if n in wanted}
        return found

    def whole(self, parts: Mapping[str, torch.Tensor]) -> Tensors:
        """Whole tensors from the parts of them that the ranks own. Collective."""
        found: Tensors = {}
        for bucket in self.buckets:
            own = {n: parts[n] for n in bucket.members if n in parts}
            joined = bucket.join(own)
            found |= {n: joined[n] for n in own}
        return found
