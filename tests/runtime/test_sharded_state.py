"""Sharded parameters while graphs run: what is fetched, gathered ahead, reduced and when."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist

from benchmarks.ranks import run_ranks
from merakc.errors import ConfigError, MerakWarning
from merakc.ir.program import Mesh
from merakc.ir.state import StateShards
from merakc.runtime import sharded_state
from merakc.runtime.groups import Groups
from merakc.runtime.sharded_state import SHARED, ShardedState
from merakc.runtime.shards import ShardGroups

STAGES = {0: {"a": 6, "b": 3}, 1: {"c": 5}, SHARED: {"tied": 4}}
NAMES = ("a", "b", "c", "tied")


def state(shards: StateShards, dp: int) -> ShardedState:
    groups = ShardGroups(Groups(Mesh(dp=dp), dist.get_rank() if dp > 1 else 0), shards)
    tensors = {
        stage: {n: torch.arange(float(size)) + len(n) for n, size in own.items()}
        for stage, own in STAGES.items()
    }
    return ShardedState(tensors, {"a", "c", "tied"}, groups, bucket_bytes=1)


def a_step(shards: StateShards) -> tuple[list[dict[str, torch.Tensor]], dict[str, int]]:
    """Two steps of two micro-batches, and the number of collectives that were waited for."""
    sharded, rank = state(shards, 2), dist.get_rank()
    with sharded.muted():
        sharded.sink("a", torch.full((6,), torch.nan))
    found = []
    for _ in range(2):
        sharded.refresh()
        for j in range(2):
            seen = {name: sharded.fetch(name).clone() for name in NAMES}
            sharded.last = j == 1
            for name in ("c", "a"):
                sharded.sink(name, torch.full_like(seen[name], 1.0 + rank + j))
        shared = {"tied": torch.full((4,), 1.0 + rank), "other": torch.ones(1)}
        sharded.sink_shared(shared)
        assert shared.keys() == {"other"}
        gradients = sharded.take_gradients()
        assert gradients.keys() == {"a", "c", "tied"}
        whole = sharded.whole(gradients)
        for name, parameter in sharded.owned.items():
            if name in gradients:
                parameter.data -= gradients[name]
        found.append(seen | {f"{n} gradient": g for n, g in whole.items()})
    return found, {"held": len(sharded.held), "order": len(sharded.order)}


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
        gathered = counts[0] > 1
        assert sizes == {"held": 2 if gathered else 0, "order": 8 if gathered else 0}


def test_optimizers_that_need_whole_matrices() -> None:
    owned = list(state(StateShards(), 1).owned.values())
    for parameter in owned:
        parameter.grad = torch.ones_like(parameter)
    torch.optim.AdamW(owned).step()
    with pytest.raises(ConfigError, match="Adafactor looks at whole parameters"):
        torch.optim.Adafactor(owned).step()
    other = torch.nn.Parameter(torch.ones(2, 2))
    other.grad = torch.ones(2, 2)
    torch.optim.Adafactor([other]).step()  # has nothing to do with sharded ones


def test_an_unknown_optimizer_is_warned_of_once(recwarn: pytest.WarningsRecorder) -> None:
    class Own(torch.optim.Optimizer):
        def step(self, closure: object = None) -> None:
            del closure

    owned = list(state(StateShards(), 1).owned.values())
    optimizer = Own(owned, {})
    try:
        with pytest.warns(MerakWarning, match="Own must update every element"):
            optimizer.step()
        optimizer.step()
    finally:
        sharded_state._known.discard(Own)
    assert not recwarn
