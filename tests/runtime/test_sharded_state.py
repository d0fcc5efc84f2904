"""Sharded parameters while graphs run: what is fetched, gathered ahead, reduced and when."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist

from benchmarks.ranks import run_ranks
from merakc.analysis.buckets import Held, plan_buckets
from merakc.ir.program import Collective, CollectiveKind, Mesh
from merakc.ir.state import StateShards
from merakc.runtime.groups import Groups, ShardGroups
from merakc.runtime.sharded_state import ShardedState
from merakc.runtime.shards import Bucket

STAGES = {"a": 6, "b": 3}, {"c": 5}, {"tied": 4}
NAMES = ("a", "b", "c", "tied")
TRAINED = {"a", "c", "tied"}
REFRESH, GATHER, WAIT = CollectiveKind.REFRESH, CollectiveKind.GATHER, CollectiveKind.WAIT


def state(shards: StateShards, dp: int) -> ShardedState:
    groups = ShardGroups(Groups(Mesh(dp=dp), dist.get_rank() if dp > 1 else 0), shards)
    held = [
        Held(n, torch.float32, size, (stage, 3)[: 1 + (n == "tied")], True, n == "tied")
        for stage, own in enumerate(STAGES)
        for n, size in own.items()
    ]
    tensors = {
        n: torch.nn.Parameter(torch.arange(float(size)) + len(n))
        for own in STAGES
        for n, size in own.items()
    }
    specs = plan_buckets(held, lambda _: shards, bucket_bytes=1)
    return ShardedState(specs, tensors, {(shards, False): groups}, {})


def gathering(shards: StateShards) -> list[Collective]:
    """Of every bucket, in the order of `NAMES`, each one ahead."""
    order = ["0:0", "0:1", "1:0", "2+3:0"]
    found = [Collective(REFRESH, b) for b in order if shards.optimizer > shards.parameters]
    if shards.parameters == 1:
        return found + [Collective(WAIT, b) for b in order]
    found.append(Collective(GATHER, order[0]))
    for bucket, then in zip(order, [*order[1:], ""], strict=True):
        found.append(Collective(WAIT, bucket))
        found += [Collective(GATHER, then)] if then else []
    return found


def a_step(shards: StateShards) -> tuple[list[dict[str, torch.Tensor]], dict[str, object]]:
    """Two steps of two micro-batches, and the number of collectives that were waited for."""
    sharded, rank = state(shards, 2), dist.get_rank()
    sharded.begin(TRAINED, TRAINED)
    with sharded.muted():
        sharded.sink("a", torch.full((6,), torch.nan))
    assert all(bucket.sum is None for bucket in sharded.buckets)
    found = []
    for _ in range(2):
        sharded.begin(TRAINED, TRAINED)
        for j in range(2):
            marks = gathering(shards)
            sharded.follow(marks if j == 0 else [m for m in marks if m.kind is not REFRESH])
            if j == 0:
                started = [
                    (b.gathering.work is not None, b in sharded.held) for b in sharded.buckets
                ]
            seen = {name: sharded.fetch(name).clone() for name in NAMES}
            sharded.last = j == 1
            for name in ("c", "a"):
                sharded.sink(name, torch.full_like(seen[name], 1.0 + rank + j))
        shared = {"tied": torch.full((4,), 1.0 + rank), "other": torch.ones(1)}
        sharded.sink_shared(shared)
        assert shared.keys() == {"other"}
        gradients = sharded.take_gradients()
        assert gradients.keys() == {"a", "c", "tied"}
        whole = {n: t for p in sharded.wholes(gradients) for n, t in p.make().items()}
        for name, parameter in sharded.owned.items():
            if name in gradients:
                parameter.data -= gradients[name]
        found.append(seen | {f"{n} gradient": g for n, g in whole.items()})
        assert not sharded.ahead
    return found, {"held": len(sharded.held), "started": started}


@pytest.mark.parametrize("counts", [(1, 1, 2), (1, 2, 2), (2, 2, 2), (1, 1, 1)])
def test_two_steps(counts: tuple[int, int, int]) -> None:
    for (first, second), sizes in run_ranks(2, partial(a_step, StateShards(*counts))):
        summed = {"a": 1.0 + 2 + 2 + 3, "c": 8.0, "tied": 3.0}  # over ranks and micro-batches
        for name in NAMES:
            size = first[name].numel()
            torch.testing.assert_close(first[name], torch.arange(float(size)) + len(name))
            moved = first[name] - summed.get(name, 0.0)
            torch.testing.assert_close(second[name], moved)
        for name, value in summed.items():
            for step in (first, second):
                assert torch.all(step[f"{name} gradient"] == value)
        # Before anything is fetched: all refreshes, or the first gather.
        started = [(counts == (1, 1, 2) or counts == (1, 2, 2), False)] * 4
        if counts[0] > 1:
            started[0] = True, True
        assert sizes == {"held": 2 if counts[0] > 1 else 0, "started": started}


class Slow(dist.Work):
    """Does not end before it is waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = 0

    def is_completed(self) -> bool:
        return False

    def wait(self, timeout: object = None) -> bool:
        del timeout
        self.waits += 1
        return True


def test_reading_a_parameter_does_not_wait_for_its_gradients() -> None:
    sharded, slow = state(StateShards(), 1), Slow()
    sharded.begin(TRAINED, TRAINED)
    bucket = sharded.bucket_of["a"]
    bucket.reducing.start(iter([slow]))
    sharded.reducing.append(bucket)
    assert sharded.fetch("a").shape == (6,)
    assert slow.waits == 0
    sharded.reducing.popleft().reducing.finish()
    assert slow.waits == 1


@pytest.mark.parametrize("holds_more", [True, False])
def test_one_bucket_is_reduced_at_a_time_where_that_takes_memory(
    monkeypatch: pytest.MonkeyPatch, *, holds_more: bool
) -> None:
    sharded, works = state(StateShards(), 1), [Slow() for _ in NAMES]
    sharded.begin(TRAINED, TRAINED)
    monkeypatch.setattr(Bucket, "holds_more", holds_more)
    monkeypatch.setattr(Bucket, "reduce", lambda _, last: iter([works.pop()]))
    given = list(works)
    for bucket in sharded.buckets[: len(NAMES)]:
        sharded._reduce(bucket)
    assert len(sharded.reducing) == (1 if holds_more else len(NAMES))
    assert [w.waits for w in reversed(given)] == ([1, 1, 1, 0] if holds_more else [0] * 4)
