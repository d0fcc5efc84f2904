"""What parameters are gathered and reduced together: buckets, in the order of first use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from merakc.ir.graph import Graph, Input, InputKind, Ref
from merakc.ir.state import StateShards

# Large enough to fill a link, small enough that a bucket's copy does not matter: the size that
# DistributedDataParallel uses.
BUCKET_BYTES = 25 << 20
# Nothing hides the gathering of the first bucket and the reduction of the last: where a stage has
# little state, its buckets are smaller, so that this is an eighth of all its communication.
LEAST_BUCKETS = 8
# But no smaller than this: over gloo 8 MiB take 15 ms of CPU in up to 8 parts, and 18 ms in 16.
LEAST_BYTES = 1 << 20
# So many times as large buckets may be, the smallest that are good enough first: over thousands of
# ranks the steps of a ring take longer than 25 MiB do. The largest are 1.6 GiB: of these two are
# gathered at a time.
BUCKET_SCALES = (1, 4, 16, 64)
# Larger ones are tried where ranks wait for such a share of a step.
WORTH_SHARE = 0.01


@dataclass(frozen=True, slots=True)
class Held:
    """A parameter that a rank holds, in the dtype in which it is kept.

    `stages` are all that have it, of other ranks too; where several are this rank's, it is shared.
    What is `on_host` is updated there; what is `fetched` is kept there, too. Those `of_experts` are
    of the rank's own experts.
    """

    name: str
    dtype: torch.dtype
    numel: int
    stages: tuple[int, ...]
    is_trained: bool
    is_shared: bool = False
    is_used: bool = True
    on_host: bool = False
    fetched: bool = False
    of_experts: bool = False


@dataclass(frozen=True, slots=True)
class BucketSpec:
    """Parameters of the same stages that are gathered and reduced together.

    `name` says the stages and the bucket's number: `2:0` is the first of stage 2, `0+3:0` the first
    of what stages 0 and 3 have, the same on the ranks of both. `2:experts:0` is the first of what
    ranks have of stage 2's experts, which may be less on some than on others. The gradients of
    shared ones are first added up over the stages of this rank. Those `on_host` are updated there;
    those that are `fetched` are kept there, and come to the device when they are read.
    """

    name: str
    stages: tuple[int, ...]
    members: tuple[str, ...]
    dtype: torch.dtype
    numel: int
    shards: StateShards
    is_trained: bool
    is_shared: bool
    on_host: bool = False
    fetched: bool = False
    of_experts: bool = False

    @property
    def is_gathered(self) -> bool:
        """Whether the device has it whole only while it is read."""
        return self.fetched or self.shards.parameters > 1

    @property
    def is_waited_for(self) -> bool:
        """Whether what reads it waits until it is there."""
        return self.fetched or self.shards.optimizer > 1


def ahead(buckets: Iterable[BucketSpec]) -> int:
    """How many buckets of a rank are gathered ahead of the one that is read: of those that are
    fetched two, since a device's links to others are faster than that to its host.
    """
    return 1 + any(bucket.fetched for bucket in buckets)


def plan_buckets(
    held: Iterable[Held],
    shards: Callable[[int], StateShards],
    bucket_bytes: int = BUCKET_BYTES,
    *,
    dp: int = 1,
) -> tuple[BucketSpec, ...]:
    """The buckets of a rank, from its parameters in the order of first use.

    `shards` gives those of a stage; of several, the first one's count; experts' have as many as
    `dp` ranks can share. A bucket of several holds
    `bucket_bytes` at most, times their `bucket_scale`, and less where that would make fewer than
    `LEAST_BUCKETS`. Frozen parameters that are neither sharded nor fetched are in none. A bucket
    holds parameters of the same stages, of experts or not, trained or frozen, updated or kept on
    the host or not; unused ones come last, so that the names of the others follow from the graphs
    alone.
    """

    def own_shards(item: Held) -> StateShards:
        given = shards(item.stages[0])
        return given.within(dp) if item.of_experts else given

    parts: dict[tuple[tuple[int, ...], *tuple[bool, ...]], list[Held]] = {}
    for item in held:
        if item.is_trained or item.fetched or own_shards(item).parameters > 1:
            kinds = not item.is_used, not item.is_trained, item.on_host, item.fetched
            parts.setdefault((item.stages, item.of_experts, *kinds), []).append(item)
    found: list[BucketSpec] = []
    numbers: Counter[str] = Counter()
    for (stages, *_), part in sorted(parts.items(), key=lambda p: p[0]):
        numel = {h.name: h.numel for h in part}
        dtype = {h.name: h.dtype for h in part}
        sizes = [(h.name, h.dtype, h.numel * h.dtype.itemsize) for h in part]
        share = max(LEAST_BYTES, sum(size for *_, size in sizes) // LEAST_BUCKETS)
        one, own = part[0], own_shards(part[0])
        whose = "+".join(map(str, stages)) + ":experts" * one.of_experts
        for names in bucket_names(sizes, min(bucket_bytes * own.bucket_scale, share)):
            found.append(
                BucketSpec(
                    f"{whose}:{numbers[whose]}", stages, names, dtype=dtype[names[0]],
                    numel=sum(numel[n] for n in names), shards=own,
                    is_trained=one.is_trained, is_shared=one.is_shared,
                    on_host=one.on_host, fetched=one.fetched, of_experts=one.of_experts,
                )
            )  # fmt: skip
            numbers[whose] += 1
    return tuple(found)


def bucket_scales(held_bytes: int) -> tuple[int, ...]:
    """The `BUCKET_SCALES` that part so many bytes of parameters of a stage otherwise."""
    pairs = zip(BUCKET_SCALES, (0, *BUCKET_SCALES), strict=False)
    return tuple(k for k, less in pairs if BUCKET_BYTES * less < held_bytes // LEAST_BUCKETS) or (
        1,
    )


def parameters_in_order(graph: Graph) -> list[Input]:
    """The parameters that a graph reads, in the order of their first use."""
    parameters = {Ref(i.name): i for i in graph.inputs if i.kind is InputKind.PARAMETER}
    read = [r for node in graph.nodes for r in node.refs]
    read += [o.ref for o in graph.outputs]
    return [parameters[ref] for ref in dict.fromkeys(read) if ref in parameters]


def bucket_names(
    items: Iterable[tuple[str, torch.dtype, int]], bucket_bytes: int = BUCKET_BYTES
) -> Iterator[tuple[str, ...]]:
    """The names of each bucket, from (name, dtype, bytes): of one dtype, and of about that size.

    A tensor that is larger is alone.
    """
    names: list[str] = []
    held_bytes, held_dtype = 0, None
    for name, dtype, size_bytes in items:
        if names and (dtype != held_dtype or held_bytes + size_bytes > bucket_bytes):
            yield tuple(names)
            names, held_bytes = [], 0
        names.append(name)
        held_bytes, held_dtype = held_bytes + size_bytes, dtype
    if names:
        yield tuple(names)
