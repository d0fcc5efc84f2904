"""State in shards: what is gathered, reduced and optimized is what one process has."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.ranks import run_ranks
from merakc.analysis.buckets import bucket_names
from merakc.ir.program import Mesh
from merakc.ir.state import StateShards, lattice
from merakc.runtime.groups import Groups, ShardGroups, reduce_scatter
from merakc.runtime.shards import Bucket

DP, STEPS, MICRO_BATCHES = 4, 3, 2
# Uneven shapes, a scalar, a parameter of fewer elements than ranks.
SHAPES = {"a": (5, 3), "b": (7,), "scalar": (), "pair": (2,), "wide": (3, 4, 2)}
Tensors = dict[str, torch.Tensor]


def initial() -> Tensors:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in SHAPES.items()
    }


def gradient(name: str, value: torch.Tensor, dp: int, step: int, micro_batch: int) -> torch.Tensor:
    """Depends on the parameter: a stale one shows."""
    return torch.sin(value * (1 + dp + 4 * micro_batch)) + len(name) + step


def plain() -> Tensors:
    state = {name: value.requires_grad_() for name, value in initial().items()}
    optimizer = torch.optim.AdamW(list(state.values()), lr=0.1, weight_decay=0.1)
    for step in range(STEPS):
        for name, value in state.items():
            value.grad = sum(
                gradient(name, value.detach(), dp, step, j)
                for dp in range(DP)
                for j in range(MICRO_BATCHES)
            )
        optimizer.step()
    return {name: value.detach() for name, value in state.items()}


def sharded(shards: StateShards, mesh: Mesh) -> tuple[Tensors, Tensors, int, int]:
    groups = Groups(mesh, dist.get_rank())
    dp = groups.coordinates[0]
    parameters = {name: torch.nn.Parameter(value) for name, value in initial().items()}
    items = ((name, p.dtype, p.nbytes) for name, p in parameters.items())
    made = ShardGroups(groups, shards)
    names = bucket_names(items, bucket_bytes=150)
    buckets = [Bucket({n: parameters[n] for n in own}, made) for own in names]
    owned = [p for bucket in buckets for p in bucket.owned.values()]
    optimizer = torch.optim.AdamW(owned, lr=0.1, weight_decay=0.1)
    for step in range(STEPS):
        for bucket in buckets:
            for j in range(MICRO_BATCHES):
                for name, value in gathered(bucket).items():
                    bucket.add(name, gradient(name, value, dp, step, j))
                bucket.reducing.start(bucket.reduce(last=j == MICRO_BATCHES - 1))
            for name, value in bucket.take_gradients().items():
                bucket.owned[name].grad = value
        optimizer.step()
        for bucket in buckets:
            bucket.gathering.start(bucket.refresh())
    kept = sum(bucket.kept.untyped_storage().nbytes() for bucket in buckets)
    joined = {n: v for b in buckets for n, v in b.join(dict(b.owned)).items()}
    return {n: v for b in buckets for n, v in gathered(b).items()}, joined, len(buckets), kept


def gathered(bucket: Bucket) -> Tensors:
    whole = bucket.kept
    if bucket.groups.gather is not None:
        whole = bucket.kept.new_empty(bucket.numel)
        bucket.gathering.start(bucket.gather(whole))
    bucket.finish()
    return bucket.views(whole)


@pytest.mark.parametrize("shards", list(lattice(DP)), ids=str)
def test_optimizing_shards_is_optimizing_the_whole(shards: StateShards) -> None:
    expected = plain()
    for found, joined, buckets, kept_bytes in run_ranks(DP, partial(sharded, shards, Mesh(dp=DP))):
        assert buckets > 1
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(joined, expected, rtol=1e-12, atol=1e-14)
        whole = 8 * sum(v.numel() for v in expected.values())
        assert kept_bytes <= (whole + buckets * 8 * DP) / shards.parameters


def test_dp_ranks_beside_other_axes() -> None:
    """Each tp rank has shards of its own."""
    expected = plain()
    for found, *_ in run_ranks(8, partial(sharded, StateShards(2, 2, 4), Mesh(dp=4, tp=2))):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


def scattered() -> tuple[torch.Tensor, torch.Tensor, list[str]]:
    """This rank's part, what was given afterwards, and the collectives that were called."""
    called: list[str] = []

    def listen(name: str) -> Callable[..., dist.Work | None]:
        real: Callable[..., dist.Work | None] = getattr(dist, name)

        def call(*args: Any, **options: Any) -> dist.Work | None:
            called.append(name)
            return real(*args, **options)

        return call

    flat = torch.arange(8.0) * 10.0 ** dist.get_rank()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_reduce", "all_to_all_single"):
            patch.setattr(dist, name, listen(name))
        steps = reduce_scatter(flat, dist.group.WORLD, torch.float32)
        while True:
            try:
                next(steps).wait()
            except StopIteration as end:
                return end.value, flat, called


def test_a_scatter_over_gloo_sends_each_rank_its_part_alone() -> None:
    for rank, (part, given, called) in enumerate(run_ranks(4, scattered)):
        assert part.tolist() == [1111.0 * (2 * rank), 1111.0 * (2 * rank + 1)]
        assert torch.equal(given, torch.arange(8.0) * 10.0**rank)
        assert called == ["all_to_all_single"]  # an all-reduce sends twice the bytes


def added_up() -> torch.Tensor:
    flat = torch.full((4,), 256.0 if dist.get_rank() == 0 else 1.0, dtype=torch.bfloat16)
    steps = reduce_scatter(flat, dist.group.WORLD, torch.float32)
    while True:
        try:
            next(steps).wait()
        except StopIteration as end:
            found: torch.Tensor = end.value
            return found


def test_sixteen_bits_are_added_up_in_float32() -> None:
    for part in run_ranks(4, added_up):
        assert part.dtype == torch.float32
        assert part.tolist() == [259.0]  # in bfloat16 256


def placed() -> tuple[bool, list[list[float]]]:
    shards = ShardGroups(Groups(Mesh(dp=2), dist.get_rank()), StateShards(1, 1, 1))
    bucket = Bucket({"a": torch.zeros(2), "b": torch.zeros(3)}, shards)
    room, first = bucket.place("b")
    bucket.add("b", room.copy_(torch.tensor([1.0, 2.0, 3.0])))
    bucket.add("a", torch.ones(2))
    room, second = bucket.place("b")
    bucket.add("b", torch.ones(3))
    bucket.add("b", room.add_(0.5))
    bucket.reducing.start(bucket.reduce(last=True))
    return second and not first, [g.tolist() for g in bucket.take_gradients().values()]


def test_a_gradient_may_be_made_or_added_up_in_its_place() -> None:
    assert run_ranks(2, placed) == [(True, [[2.0, 2.0], [5.0, 7.0, 9.0]])] * 2
