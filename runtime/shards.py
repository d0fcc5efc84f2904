"""Parameters, gradients and optimizer state in shards over dp and cp, as a plan says.

Parameters stand one behind the other in buckets, flat buffers that are padded to be cut evenly. A
rank keeps its shard of a bucket's parameters and its shard of what the optimizer updates, a part of
the former unless that is of another dtype: `owned` are views of it, one a parameter, some of them
empty. Elementwise optimizers update them as they would the whole.

With s_p, s_g and s_os shards (AMSP, arXiv 2311.00257) these ranks are blocks of s_os neighbours.
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
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from merakc.ir.precision import Precision
from merakc.kernels.collectives import gather_into
from merakc.runtime.groups import ShardGroups, reduce_scatter
from merakc.runtime.host import HOST, brought_down, brought_up, empty, fetch
from merakc.runtime.streams import Mark, Running, Work, streams_of, wait_for

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

    def shaped(self, part: torch.Tensor) -> torch.Tensor:
        """A part with as many dims as the whole, which users group parameters by."""
        if part.numel() == self.shape.numel():
            return part.view(self.shape)
        return part.view((1,) * (len(self.shape) - 1) + (part.numel(),))


def _members(tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, Member]]:
    """The places of tensors, one behind the other, by their names."""
    start = 0
    for name, tensor in tensors.items():
        yield name, Member(name, tensor.shape, start)
        start += tensor.numel()


class Bucket:
    """Some parameters of one dtype, on one rank.

    `kept` is the rank's shard of them as they are computed with. `master` is what it optimizes of
    them: in a `precision`, and `on_host`, memory of its own, otherwise a view of `kept`; `on_host`
    beside the device, as are its gradients in the end. What is `fetched` has `kept` there, too.
    `owned` are the parameters' parts of `master`. `gathering` and `reducing` are what runs of its
    collectives.

    Tensors on the meta device begin as zeros, on `device`.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        groups: ShardGroups,
        precision: Precision | None = None,
        device: torch.device | None = None,
        *,
        on_host: bool = False,
        fetched: bool = False,
    ) -> None:
        assert not fetched or groups.shards.updates_what_it_keeps, "who fetches updates"
        self.groups, shards = groups, groups.shards
        self.members = dict(_members(tensors))
        self.total, first = sum(t.numel() for t in tensors.values()), next(iter(tensors.values()))
        self.numel = math.ceil(self.total / shards.optimizer) * shards.optimizer
        self.device, self.fetched, self.on_host = device or first.device, fetched, on_host
        flat = torch.zeros(
            self.numel, dtype=precision.dtype("master") if precision else first.dtype,
            device=HOST if fetched else self.device,
        )  # fmt: skip
        for name, member in self.members.items():
            if not tensors[name].is_meta:
                member.part(flat, 0).copy_(tensors[name].detach().reshape(-1))
        self.kept_size, self.kept_at = self._shard(shards.parameters, groups.parameter_index)
        self.owned_size, self.owned_at = self._shard(shards.optimizer, groups.owned_index)
        self.gradient_dtype = precision.dtype("gradients") if precision else first.dtype
        self.comes_down: Callable[[Bucket, Mark], None] | None = None  # its gradient, behind a mark
        self.is_tied = False  # whether ranks of other stages add gradients, once these are reduced
        self.has_master = precision is not None or (on_host and not fetched)
        self.kept = self._made_kept(flat, precision)
        self.master = self._made_master(flat)
        self.reduce_dtype = torch.promote_types(self.gradient_dtype, torch.float32)
        self.owned = {
            name: nn.Parameter(
                member.shaped(member.part(self.master, self.owned_at)),
                requires_grad=tensors[name].requires_grad,
            )
            for name, member in self.members.items()
        }
        self.is_trained = any(p.requires_grad for p in self.owned.values())
        assert on_host or not (fetched and self.is_trained), "what is kept there is updated there"
        self.whole = self.views(self.kept) if not self.is_gathered else {}
        self.sum: torch.Tensor | None = None  # whole gradients, while they are added up
        self.summed: set[str] = set()  # those of them that are there
        self.gradient: torch.Tensor | None = None  # the rank's shard of them
        self.arrived: set[str] = set()  # those of the running micro-batch
        streams = streams_of(self.device)
        # Aside, what is gathered once it has come is started at once.
        comes_first = fetched and groups.gather is not None
        self.gathering, self.reducing = Running(streams if comes_first else None), Running(streams)

    def _shard(self, count: int, index: int) -> tuple[int, int]:
        """The size of one of so many shards, and where it begins."""
        size = self.numel // count
        return size, index * size

    def _made_kept(self, flat: torch.Tensor, precision: Precision | None) -> torch.Tensor:
        """This rank's shard of all the parameters, as they are computed with."""
        own = flat[self.kept_at : self.kept_at + self.kept_size]
        if self.fetched or precision is not None:
            return self._copy_of(own, precision.dtype("compute") if precision else own.dtype)
        return flat if self.groups.shards.parameters == 1 else own.clone()

    def _made_master(self, flat: torch.Tensor) -> torch.Tensor:
        """What this rank optimizes of all the parameters."""
        own = flat[self.owned_at : self.owned_at + self.owned_size]
        if not self.has_master:
            return self._own(self.kept)
        if self.on_host:
            return brought_down(own, own.dtype)
        return own if self.groups.shards.optimizer == 1 else own.clone()

    def _own(self, kept: torch.Tensor) -> torch.Tensor:
        """What this rank optimizes, in the shard of the parameters that it keeps."""
        return kept[self.owned_at - self.kept_at :][: self.owned_size]

    def _copy_of(self, flat: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A copy in a dtype; what is fetched lives beside the device."""
        if self.fetched:
            return empty(flat.numel(), dtype, self.device).copy_(flat)
        return flat.to(dtype, copy=True)

    @property
    def is_gathered(self) -> bool:
        """Whether the device has it whole only while it is read."""
        return self.fetched or self.groups.gather is not None

    @property
    def extra_bytes(self) -> int:
        """What the device holds of the parameters beside `master`."""
        if self.fetched:
            return 0
        return self.kept.nbytes - (0 if self.has_master else self.master.nbytes)

    @property
    def holds_more(self) -> bool:
        """Whether gradients take more memory while they are reduced than before and after."""
        return self.groups.shards.optimizer > 1 or self.gradient_dtype != self.reduce_dtype

    def finish(self) -> None:
        """Waits for the collectives of this bucket."""
        self.gathering.finish()
        self.reducing.finish()

    @property
    def is_alone(self) -> bool:
        """Whether nothing but this bucket holds the memory of what it optimizes."""
        memory = self.master.untyped_storage()
        own = (self.kept, self.master, *self.owned.values(), *self.whole.values())
        ours = {id(t) for t in own if t.untyped_storage().data_ptr() == memory.data_ptr()}
        return torch._C._storage_Use_Count(memory._cdata) <= len(ours) + 1  # the last is `memory`

    def move(self) -> None:
        """Leaves the memory of what this rank optimizes to who else holds it."""
        if self.on_host and self.has_master:
            self.master = brought_down(self.master, self.master.dtype)
        elif self.has_master:
            self.master = self.master.clone()
        else:
            self.kept = self._copy_of(self.kept, self.kept.dtype)
            self.master = self._own(self.kept)

    def restore(self) -> None:
        """Makes the parameters views of the bucket again."""
        for name, member in self.members.items():
            self.owned[name].data = member.shaped(member.part(self.master, self.owned_at))
        self.whole = self.views(self.kept) if not self.is_gathered else {}

    def copy_(self, other: Bucket) -> None:
        """Takes the values of a bucket like this one."""
        other.finish()
        self.kept.copy_(other.kept)
        if self.has_master:
            self.master.copy_(other.master)

    def refresh(self) -> Iterator[Work]:
        """Brings what the optimizers of all ranks wrote into `kept`. What this rank optimizes stays
        as it is, and so are its parameters not written to.
        """
        if not self.is_trained:
            return
        own = self._own(self.kept)
        if self.fetched and self.has_master:
            wait_for(self.device)  # what was fetched before has been read
            own.copy_(self.master)
        elif self.fetched:
            pass
        elif self.on_host:
            brought_up(own, self.master)
        elif self.has_master:
            own.copy_(self.master)
        if self.groups.refresh is not None:
            with _unsafe_preserve_version_counter(self.kept):
                yield gather_into(self.kept, own, self.groups.refresh)

    def gather(self, whole: torch.Tensor) -> Iterator[Work]:
        """Fills `whole` with the parameters of all shards; what is fetched comes up before."""
        own = self.kept
        if self.fetched:
            own = whole[self.kept_at :][: self.kept_size]
            copying = fetch(own, self.kept)
            if copying is not None:
                yield copying
        if self.groups.gather is not None:
            yield gather_into(whole, own, self.groups.gather)

    def bounds(self, name: str, index: int) -> tuple[int, int]:
        """The elements of a parameter that shard `index` of the optimizer's has."""
        member, first = self.members[name], index * self.owned_size
        start, stop = (
            min(max(at, member.start), member.stop) - member.start
            for at in (first, first + self.owned_size)
        )
        return start, stop

    def views(self, whole: torch.Tensor) -> Tensors:
        """The parameters in the whole bucket."""
        return {n: m.part(whole, 0).view(m.shape) for n, m in self.members.items()}

    def place(self, name: str) -> tuple[torch.Tensor, bool]:
        """Where one parameter's gradient belongs, and whether one is there to add it to."""
        return self._part_of_sum(name), name in self.summed

    def add(self, name: str, gradient: torch.Tensor) -> None:
        """Adds one parameter's gradient to the whole gradients, unless it was made in its place."""
        part = self._part_of_sum(name)
        if gradient.data_ptr() == part.data_ptr():
            pass
        elif name in self.summed:
            part.add_(gradient)
        else:
            part.copy_(gradient)
        self.summed.add(name)
        self.arrived.add(name)

    def _part_of_sum(self, name: str) -> torch.Tensor:
        if self.sum is None:
            self.sum = torch.empty(self.numel, dtype=self.gradient_dtype, device=self.device)
            self.sum[self.total :] = 0
        member = self.members[name]
        return member.part(self.sum, 0).view(member.shape)

    def reduce(self, *, last: bool) -> Iterator[dist.Work]:
        """Scatters what was added where gradients are sharded; after the last micro-batch, leaves
        the sum over all ranks of what this rank owns in `gradient`.
        """
        shards, groups = self.groups.shards, self.groups
        self.arrived.clear()
        if shards.gradients > 1:
            flat = self._take_sum()
            if shards.gradients == shards.parameters:
                flat = yield from reduce_scatter(flat, groups.gather, self.reduce_dtype)
            else:
                flat = flat.view(shards.parameters, -1, self.owned_size)
                flat = flat.transpose(0, 1).reshape(-1)
                flat = yield from reduce_scatter(flat, groups.block, self.reduce_dtype)
            flat = flat if self.gradient is None else flat.add_(self.gradient)
            self.gradient = flat if last else flat.to(self.gradient_dtype)
        elif last:
            self.gradient = self._take_sum()
        if last:
            assert self.gradient is not None
            group = groups.refresh if shards.gradients != shards.optimizer else None
            self.gradient = yield from reduce_scatter(self.gradient, group, self.reduce_dtype)
            if groups.replicas is not None:
                work = dist.all_reduce(self.gradient, group=groups.replicas, async_op=True)
                assert work is not None
                yield work
            if self.on_host and not self.is_tied:
                yield from self.bring_down()

    def bring_down(self) -> Iterator[dist.Work]:
        """Brings the reduced gradients beside the device, and leaves nothing of them there."""
        assert self.gradient is not None, "no gradients were reduced"
        own = self.reducing.lend(self.gradient)
        self.gradient = brought_down(own, self.master.dtype)
        if self.comes_down is not None:
            streams = self.reducing.streams
            self.comes_down(self, streams.mark() if streams else None)
        yield from ()

    def _take_sum(self) -> torch.Tensor:
        """The whole gradients, to be reduced."""
        assert self.sum is not None, "no micro-batch has added its gradients"
        flat, self.sum = self.reducing.lend(self.sum), None
        for name in self.members.keys() - self.summed:
            self.members[name].part(flat, 0).zero_()
        self.summed.clear()
        return flat

    def drop(self) -> None:
        """Forgets what was added."""
        self.sum = None
        self.summed.clear()
        self.arrived.clear()

    def reduced(self) -> torch.Tensor:
        """The sum of what this rank owns, once the last reduction has been started; zeros where no
        graph of this rank makes any.
        """
        self.reducing.finish()
        if self.gradient is None:
            self.gradient = torch.zeros(
                self.owned_size, dtype=self.reduce_dtype, device=self.device
            )
        return self.gradient

    def take_gradients(self) -> Tensors:
        """The gradients of what this rank owns, once the last reduction has been started."""
        self.reducing.finish()
        if self.on_host and self.is_tied:
            self.reducing.start(self.bring_down())
        self.reducing.settle()
        gradient, self.gradient = self.gradient, None
        assert gradient is not None, "no gradients were reduced"
        return self._parts(gradient.to(self.master.dtype))

    def parts_of_gradient(self) -> Tensors:
        """The gradients of what this rank owns, beside the device, where they may still come to."""
        assert self.gradient is not None, "no gradients come down"
        return self._parts(self.gradient)

    def _parts(self, flat: torch.Tensor) -> Tensors:
        return {n: m.shaped(m.part(flat, self.owned_at)) for n, m in self.members.items()}

    def join(self, parts: Mapping[str, torch.Tensor]) -> Tensors:
        """Whole tensors like the parameters from the parts of them that the ranks own. Collective.

        Where a rank has none of a name, its part counts as zeros.
        """
        flat = torch.zeros(self.owned_size, dtype=self.master.dtype, device=self.device)
        for name, part in parts.items():
            self.members[name].part(flat, self.owned_at).copy_(part.detach().reshape(-1))
        whole = flat.new_empty(self.numel)
        if self.groups.block is None:
            whole = flat
        else:
            gather_into(whole, flat, self.groups.block).wait()
            shards = self.groups.shards
            parts_of = whole.view(-1, shards.parameters, self.owned_size)
            whole = parts_of.transpose(0, 1).reshape(-1)
        return self.views(whole)
