"""Process groups of the mesh, agreement between ranks, and reductions over groups of ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from merakc.analysis.buckets import BUCKET_BYTES
from merakc.analysis.calls import Way, purpose
from merakc.errors import MerakError, MismatchError
from merakc.ir.layout import Layout
from merakc.ir.program import Mesh
from merakc.ir.state import Role, StateShards
from merakc.kernels.collectives import scatter_single
from merakc.runtime.health.job import TIMEOUT_S, all_ranks, new_group
from merakc.runtime.streams import streams_of

T = TypeVar("T")
CPU = torch.device("cpu")
# Process groups of messages, by way between ranks. None is the default group.
Channels = Mapping[Way, dist.ProcessGroup | None]
# Of the 132 multiprocessors of an H100, a message's: two a direction fill a link between nodes.
MESSAGE_CTAS = 4


@dataclass(slots=True)
class Groups:
    """The process groups that this rank belongs to. All ranks make all groups, in one order.

    Whatever waits in one of them for longer than `timeout_s` ends with an error. NCCL connects the
    ranks of a group when they first call it, and all wait for that: where several groups were
    called in different orders they would wait for each other. So where `device` has streams, each
    is called as soon as it is made.
    """

    mesh: Mesh
    rank: int
    timeout_s: float = TIMEOUT_S
    device: torch.device = CPU
    made: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup] = field(default_factory=dict)

    @property
    def coordinates(self) -> tuple[int, int, int]:
        """This rank's (dp, pp, lane)."""
        return self.mesh.coordinates(self.rank)

    def group(
        self, families: Iterable[Sequence[int]], purpose: str = ""
    ) -> dist.ProcessGroup | None:
        """The group of this rank among families of ranks; every rank must make the same call.

        None where this rank is in none of them, or alone. For each `purpose` there is a group of
        its own, with connections of its own.
        """
        own: dist.ProcessGroup | None = None
        for family in families:
            ranks = tuple(sorted(family))
            if len(ranks) < 2:
                continue
            if (purpose, ranks) not in self.made:
                self.made[purpose, ranks] = self._new(ranks, is_message=bool(purpose))
            if self.rank in ranks:
                own = self.made[purpose, ranks]
        return own

    def _new(self, ranks: tuple[int, ...], *, is_message: bool) -> dist.ProcessGroup:
        if streams_of(self.device) is None:
            return new_group(ranks, self.timeout_s)
        options = nccl_options(self.timeout_s) if is_message else None
        group = new_group(ranks, self.timeout_s, options=options)
        if self.rank in ranks:
            word = torch.zeros(1, dtype=torch.float32, device=self.device)
            if not is_message:
                dist.all_reduce(word, group=group)
            elif self.rank == ranks[0]:  # which NCCL connects apart from collectives
                dist.send(word, ranks[1], group)
            else:
                dist.recv(word, ranks[0], group)
        return group

    def axis(self, name: str, purpose: str = "") -> dist.ProcessGroup | None:
        """The group along one mesh axis ("dp", "cp", "tp", "pp"), "lanes": those of cp and tp,
        "model": all ranks of one dp, or "world": all ranks.
        """
        mesh = self.mesh
        families: dict[Any, list[int]] = {}
        for rank in range(mesh.world_size):
            dp, pp, lane = mesh.coordinates(rank)
            rest = {
                "dp": (pp, lane), "cp": (dp, pp, lane % mesh.tp), "tp": (dp, pp, lane // mesh.tp),
                "pp": (dp, lane), "lanes": (dp, pp), "model": (dp,), "world": (),
            }  # fmt: skip
            families.setdefault(rest[name], []).append(rank)
        return self.group(families.values(), purpose)

    def of_weight(self, layout: Layout) -> dist.ProcessGroup | None:
        """The ranks that have the parts of a split weight between them."""
        return self.axis("lanes" if self.mesh.is_of_experts(layout) else "tp")

    @property
    def weight_rank(self) -> int:
        """Which part of it this rank has."""
        return self.coordinates[2] % self.mesh.weight_ranks

    def open(self) -> None:
        """Makes the groups of all axes now: to wait for one in a step, where a rank was lost, would
        take as long as waits may.
        """
        for name in ("dp", "cp", "tp", "pp", "lanes", "model", "world"):
            self.axis(name)

    def holders(self, ranks: Sequence[int]) -> dist.ProcessGroup | None:
        """These pipeline ranks' ranks with the same shards as this one, in its dp replica."""
        mesh = self.mesh
        return self.group(
            [mesh.rank(dp, r, lane) for r in ranks]
            for dp in range(mesh.dp)
            for lane in range(mesh.lanes)
        )

    def channels(self, ways: Sequence[Way]) -> Channels:
        """The groups of messages over these ways between pipeline ranks.

        On devices with streams each is of its two ranks (`merakc.analysis.calls`). Gloo has tags:
        there all pipeline ranks have one for each direction, of activations and of gradients.
        """
        found: dict[Way, dist.ProcessGroup | None] = {}
        dp, own, lane = self.coordinates
        for way in ways:
            source, target, is_grad = way
            if streams_of(self.device) is None:
                group = self.axis("pp", purpose(way))
            else:
                group = self.group(
                    ([self.mesh.rank(d, source, t), self.mesh.rank(d, target, t)]
                     for d in range(self.mesh.dp) for t in range(self.mesh.lanes)),
                    purpose(way),
                )  # fmt: skip
            if own in (source, target):
                of = self.mesh.rank(dp, source, lane), self.mesh.rank(dp, target, lane), is_grad
                found[of] = group
        return found


def nccl_options(timeout_s: float) -> Any:
    """Those of NCCL for messages, where ranks exchange by it: they begin before what waits already,
    and take few multiprocessors, which receives that are posted ahead hold while nothing comes.
    """
    if "nccl" not in dist.get_backend_config():
        return None
    options = dist.ProcessGroupNCCL.Options()
    options.is_high_priority_stream = True
    options.config.max_ctas = MESSAGE_CTAS
    options._timeout = timedelta(seconds=timeout_s)
    return options


def agree(facts: Callable[[], Mapping[str, str]]) -> None:
    """Checks that all ranks find the same facts, before anything else is sent.

    A rank that fails to find them raises its own error, all others `MismatchError` with that
    rank's. Where facts differ, `MismatchError` on every rank names the ranks that differ from the
    majority, and how.
    """
    everyone = together(facts)
    for key in everyone[0]:
        values = [f[key] for f in everyone]
        common, _ = Counter(values).most_common(1)[0]
        odd = {r: v for r, v in enumerate(values) if v != common}
        if odd:
            listed = ", ".join(f"rank {r} has {v!r}" for r, v in odd.items())
            raise MismatchError(
                f"the ranks differ in {key}: {listed}, the others {common!r}; start all ranks "
                "with the same model, arguments and versions, and with one PYTHONHASHSEED where "
                "these go through sets"
            )


def together(make: Callable[[], T]) -> list[T]:
    """What each rank makes, in the order of ranks, on every rank. Values must be picklable.

    A rank that fails raises its own error, all others `MismatchError`, so that none waits for it.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [make()]
    made: T | None = None
    failure: Exception | None = None
    try:
        made = make()
    except Exception as error:
        failure = error
    text = f"{type(failure).__name__}: {failure}" if failure else ""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (made, text), all_ranks())
    if failure is not None:
        raise failure
    for rank, (_, error_text) in enumerate(everyone):
        if error_text:
            raise MismatchError(f"rank {rank} could not take part: {error_text}")
    return [value for value, _ in everyone]


def from_rank_0(make: Callable[[], T]) -> T:
    """What rank 0 makes, on every rank; so are its errors of merakc's."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return make()

    def attempt() -> tuple[T | None, MerakError | None]:
        if dist.get_rank():
            return None, None
        try:
            return make(), None
        except MerakError as error:
            return None, error

    made, failure = together(attempt)[0]
    if failure is not None:
        raise failure
    return made  # type: ignore[return-value]


def reduce_tensors(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Sums the tensors over the group, in place, in buckets of one dtype; in float32 or wider."""
    bucket: list[torch.Tensor] = []
    size = 0
    for tensor in [*tensors, None]:
        full = tensor is None or (bucket and bucket[0].dtype != tensor.dtype)
        if bucket and (full or size >= BUCKET_BYTES):
            flat = torch.cat([t.reshape(-1) for t in bucket])
            flat = flat.to(torch.promote_types(flat.dtype, torch.float32))
            dist.all_reduce(flat, group=group)
            for own, summed in zip(
                bucket, torch.split(flat, [t.numel() for t in bucket]), strict=True
            ):
                own.copy_(summed.view_as(own))
            bucket, size = [], 0
        if tensor is not None:
            bucket.append(tensor)
            size += tensor.numel() * tensor.element_size()


class ShardGroups:
    """The process groups of one rank's shards, and its place in them. All ranks make it at once."""

    def __init__(self, groups: Groups, shards: StateShards, *, of_experts: bool = False) -> None:
        self.mesh = mesh = groups.mesh.sharers(of_experts=of_experts)
        shards.check(mesh.state_ranks)
        self.shards, self.groups = shards, groups
        within = mesh.state_rank(groups.rank) % shards.optimizer
        self.parameter_index = within % shards.parameters
        self.owned_index = self.index_of(within)
        self.gather = self._make(Role.GATHER)
        self.refresh = self._make(Role.REFRESH)
        self.block = self._make(Role.BLOCK)
        self.replicas = self._make(Role.REPLICAS)

    def index_of(self, within: int) -> int:
        """Which shard of the optimizer's a rank of a block has."""
        parameters = self.shards.parameters
        inner = self.shards.optimizer // parameters
        return within % parameters * inner + within // parameters

    def _make(self, role: Role) -> dist.ProcessGroup | None:
        """The groups of ranks with the same key, among those that share their state."""
        mesh = self.mesh
        families: dict[tuple[Any, ...], list[int]] = {}
        for rank in range(mesh.world_size):
            key = mesh.sharing(rank), self.shards.key(role, mesh.state_rank(rank))
            families.setdefault(key, []).append(rank)
        return self.groups.group(families.values())


def reduce_scatter(
    flat: torch.Tensor, group: dist.ProcessGroup | None, dtype: torch.dtype
) -> Generator[dist.Work, None, torch.Tensor]:
    """This rank's part of the sum over the group, added up in `dtype`.

    gloo's own is an all-reduce, of twice the bytes. There ranks exchange parts and add them up
    themselves, in the order of ranks: 16 MiB over two ranks at 1 Gb/s take 79 ms where its own
    takes 142 and an all-reduce 135, over four ranks of one machine 15, 40 and 23 ms. So they do
    where what is added up is narrower than the sum, and travels as it is.
    """
    if group is None:
        return flat.to(dtype)
    size = dist.get_world_size(group)
    if dist.get_backend(group) == "gloo" or flat.dtype != dtype:
        parts = torch.empty_like(flat)
        work = dist.all_to_all_single(parts, flat, group=group, async_op=True)
        assert work is not None
        yield work
        return parts.view(size, -1).sum(0, dtype=dtype)
    own = flat.chunk(size)[dist.get_rank(group)]
    out = torch.empty_like(own)
    yield scatter_single(out, flat, group=group, async_op=True)
    return out
