"""The sharded parameters of a rank while steps run: fetched when a graph reads them, their
gradients reduced as soon as they are complete.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist

from merakc.analysis.buckets import BucketSpec
from merakc.analysis.calls import IN_FLIGHT
from merakc.ir.graph import TensorSpec
from merakc.ir.precision import Precision
from merakc.ir.program import Collective, CollectiveKind
from merakc.ir.state import StateShards
from merakc.runtime.groups import ShardGroups
from merakc.runtime.shards import Bucket
from merakc.runtime.state import Pieces
from merakc.runtime.streams import Mark

Tensors = dict[str, torch.Tensor]
GATHERING = (CollectiveKind.REFRESH, CollectiveKind.GATHER, CollectiveKind.WAIT)


class Updates(Protocol):
    """What updates what lives beside the device as soon as its gradients are there."""

    def check(self, *, of_weights: bool = False) -> None:
        """Raises `ConfigError` where the last step waits for its end in the user's loop, and for
        who reads weights where it broke off.
        """

    def loading(self, optimizers: Collection[Any]) -> AbstractContextManager[None]:
        """While weights are loaded, and the state of these optimizers."""

    def step(self, doubtful: Collection[str]) -> AbstractContextManager[None]:
        """The run of a training step, in which perhaps some of the `doubtful` parameters are not
        used: those wait for the optimizer's step.
        """

    def ended(self, gradients: Tensors) -> Callable[[float], None]:
        """Takes those that were used out of a step's gradients; what it returns is to be called in
        the backward of the loss, with its gradient.
        """

    def arrives(self, bucket: Bucket, mark: Mark) -> None:
        """The gradients of a bucket come down, and are there behind a mark."""

    def finish(self) -> None:
        """Waits for all updates of a step."""


class ShardedState:
    """The buckets of a rank: `specs`, of `tensors`, over the groups of their shards, which are
    others of experts.

    What a Program's action says of gathering is given to `follow`. A bucket is reduced when the
    last of its parameters has its gradient. What several stages of the rank share is added up
    before that; what stages of several ranks share, after, over `holders`: its buckets are the same
    on all of them.
    """

    def __init__(
        self,
        specs: Sequence[BucketSpec],
        tensors: Tensors,
        groups: Mapping[tuple[StateShards, bool], ShardGroups],
        holders: Mapping[tuple[int, ...], dist.ProcessGroup | None],
        precision: Precision | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.specs = tuple(specs)
        self.named = {
            spec.name: Bucket(
                {name: tensors[name] for name in spec.members},
                groups[spec.shards, spec.of_experts],
                precision if spec.is_trained else None,
                device,
                on_host=spec.on_host,
                fetched=spec.fetched,
            )
            for spec in specs
        }
        self.buckets = list(self.named.values())
        self.bucket_of = {name: b for b in self.buckets for name in b.members}
        self.tied = [
            (self.named[spec.name], holders[spec.stages])
            for spec in specs
            if spec.is_trained and holders.get(spec.stages) is not None
        ]
        for bucket, _ in self.tied:
            bucket.is_tied = True
        self.shared = {name for spec in specs if spec.is_shared for name in spec.members}
        self.trained: Set[str] = frozenset()  # the parameters that get a gradient in this step
        self.made: Collection[str] = ()  # those that this rank makes one of
        self.wanted: dict[Bucket, set[str]] = {}  # those that get one of this rank, by bucket
        self.last = False  # whether the gradients that come are those of the last micro-batch
        self.is_muted = False
        self.reducing: deque[Bucket] = deque()
        self._updates: Updates | None = None
        self.held: dict[Bucket, torch.Tensor] = {}  # whole ones
        self.unread: set[Bucket] = set()  # those of them that were gathered ahead
        self.current: Bucket | None = None  # the one of them that was read last
        self.ahead: deque[Collective] = deque()  # what the running action is still to start

    def begin(self, trained: Set[str], made: Collection[str]) -> None:
        """Starts a step in which these parameters get gradients, and this rank makes those."""
        if self._updates is not None:
            self._updates.check()
        if trained is not self.trained or made is not self.made:
            self.trained, self.made = trained, made
            self.wanted = {b: {n for n in b.members if n in made} for b in self.buckets}
        self.end()
        self.ahead.clear()
        for bucket in self.buckets:
            if bucket.groups.refresh is None:
                bucket.gathering.start(bucket.refresh())

    def end(self) -> None:
        """Lets go of what was gathered."""
        self.held.clear()
        self.unread.clear()
        self.current = None

    def follow(self, collectives: Sequence[Collective]) -> None:
        """Gathers from here on as an action of the Program says: now what it does not wait for, the
        rest as its parameters are fetched.
        """
        assert not self.ahead, "the last action has not read what its Program says"
        self.ahead.extend(c for c in collectives if c.kind in GATHERING)
        self._start_ahead()

    def _start_ahead(self) -> None:
        while self.ahead and self.ahead[0].kind is not CollectiveKind.WAIT:
            started = self.ahead.popleft()
            bucket = self.named[started.bucket]
            if started.kind is CollectiveKind.REFRESH:
                bucket.gathering.start(bucket.refresh())
            else:
                self._gather(bucket)

    @contextmanager
    def muted(self) -> Iterator[None]:
        """Gradients are added up but not reduced, and dropped: those of values of no meaning."""
        self.is_muted = True
        try:
            yield
        finally:
            self.is_muted = False
            for bucket in self.buckets:
                bucket.drop()

    @property
    def owned(self) -> dict[str, torch.nn.Parameter]:
        """What this rank optimizes, by the parameters' names."""
        return {name: p for bucket in self.buckets for name, p in bucket.owned.items()}

    @property
    def extra_bytes(self) -> int:
        """What the device holds beside `owned`: other ranks' parts."""
        return sum(b.extra_bytes for b in self.buckets)

    @property
    def gathered_sizes(self) -> list[tuple[int, bool]]:
        """The bytes of each bucket that is gathered, and whether it has several parameters."""
        own = (b for b in self.buckets if b.is_gathered)
        return [(b.numel * b.kept.itemsize, len(b.members) > 1) for b in own]

    def fetch(self, name: str) -> torch.Tensor:
        """A whole parameter; the next bucket is gathered while it is used."""
        bucket = self.bucket_of[name]
        if bucket.is_gathered:
            if bucket not in self.held:
                self._gather(bucket)
            self.current = bucket
            self.unread.discard(bucket)
        bucket.gathering.finish()
        self._advance()
        if self.ahead and self.named[self.ahead[0].bucket] is bucket:
            self.ahead.popleft()
            self._start_ahead()
        if not bucket.is_gathered:
            return bucket.whole[name]
        member = bucket.members[name]
        return member.part(self.held[bucket], 0).view(member.shape)

    def _gather(self, bucket: Bucket) -> None:
        """Starts to gather a bucket, in the place of those that were read before the current."""
        self.held = {
            b: whole for b, whole in self.held.items() if b is self.current or b in self.unread
        }
        self.unread.add(bucket)
        self.held[bucket] = whole = torch.empty(
            bucket.numel, dtype=bucket.kept.dtype, device=bucket.device
        )
        bucket.gathering.start(bucket.gather(whole))

    def sinks(self, name: str) -> bool:
        """Whether the gradient of a parameter is taken as soon as a graph has made it."""
        return name in self.bucket_of and name not in self.shared

    def takes(self, name: str, spec: TensorSpec) -> bool:
        """Whether a gradient can be made in its place among those of its bucket."""
        bucket = self.bucket_of[name]
        return spec.dtype == bucket.gradient_dtype and spec.shape == bucket.members[name].shape

    def place(self, name: str) -> tuple[torch.Tensor, bool]:
        """Where a graph writes the gradient of a parameter, so that `sink` need not copy it, or,
        where one is there, adds it.
        """
        return self.bucket_of[name].place(name)

    def sink(self, name: str, gradient: torch.Tensor) -> None:
        """Takes a micro-batch's gradient of a parameter."""
        bucket = self.bucket_of[name]
        bucket.add(name, gradient)
        if len(bucket.arrived) == len(self.wanted[bucket]):
            if not self.is_muted:
                self._reduce(bucket)
            elif bucket.groups.shards.gradients > 1:
                bucket.drop()
            else:
                bucket.arrived.clear()
        self._advance()

    def _reduce(self, bucket: Bucket) -> None:
        """Starts a reduction; where that takes memory, once those before it have ended, or, aside,
        all but the last.
        """
        ahead = IN_FLIGHT if bucket.reducing.streams else 0
        while bucket in self.reducing or (bucket.holds_more and len(self.reducing) > ahead):
            self.reducing.popleft().reducing.finish()
        bucket.reducing.start(bucket.reduce(last=self.last))
        self.reducing.append(bucket)

    def _advance(self) -> None:
        """Goes on with the reduction that started first, and then the next: in the same order on
        all ranks, whichever ends first.
        """
        while self.reducing and self.reducing[0].reducing.poll():
            self.reducing.popleft()

    def sink_shared(self, gradients: Tensors) -> None:
        """Takes the gradients of shared parameters out of `gradients`, once they are added up."""
        self.last = True
        for name in sorted(self.shared & gradients.keys()):
            self.sink(name, gradients.pop(name))

    def take_gradients(self) -> Tensors:
        """The gradients of what this rank owns, of the trained parameters."""
        while self.reducing:
            self.reducing.popleft().reducing.finish()
        for bucket, group in self.tied:
            if not self.trained.isdisjoint(bucket.members):
                dist.all_reduce(bucket.reduced(), group=group)
        found: Tensors = {}
        for bucket in self.buckets:
            names = self.trained & bucket.members.keys()
            if names:
                gradients = bucket.take_gradients()
                found |= {name: gradients[name] for name in names}
        if self.updates is not None:
            self.updates.finish()
        return found

    @property
    def updates(self) -> Updates | None:
        """What updates what lives beside the device as its gradients come down."""
        return self._updates

    @updates.setter
    def updates(self, given: Updates) -> None:
        """Has gradients told to it as they come down."""
        self._updates = given
        for bucket in self.buckets:
            bucket.comes_down = given.arrives

    def wholes(self, parts: Mapping[str, torch.Tensor]) -> Iterator[Pieces]:
        """Whole tensors from the parts of them that the ranks own, a bucket at a time."""
        for bucket in self.buckets:
            own = {name: parts[name] for name in bucket.members if name in parts}
            yield Pieces(list(own), partial(bucket.join, own))
