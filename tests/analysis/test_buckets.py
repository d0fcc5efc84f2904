"""Which parameters are gathered and reduced together."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from merakc.analysis.buckets import (
    LEAST_BUCKETS,
    Held,
    bucket_names,
    bucket_scales,
    parameters_in_order,
    plan_buckets,
)
from merakc.frontend.record import record
from merakc.ir.state import UNSHARDED, StateShards

WEIGHT = Held("a", torch.float32, 10, (0,), is_trained=True)


class Backwards(nn.Module):
    """Uses its last parameters first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3)
        self.unused = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A sum."""
        return self.first(self.second(x)).sum()


def test_parameters_come_in_the_order_of_their_use() -> None:
    graph = record(Backwards(), (torch.ones(2, 3),), {}).graph
    found = [i.target for i in parameters_in_order(graph)]
    assert found == ["second.weight", "second.bias", "first.weight"]


def test_buckets_are_of_one_dtype_and_of_about_a_size() -> None:
    single, half = torch.float32, torch.float16
    items = [("a", single, 6), ("b", single, 5), ("c", half, 1), ("d", half, 20), ("e", half, 1)]
    assert list(bucket_names(items, 11)) == [("a", "b"), ("c",), ("d",), ("e",)]
    assert list(bucket_names(items, 10)) == [("a",), ("b",), ("c",), ("d",), ("e",)]
    assert list(bucket_names([], 10)) == []


def test_buckets_are_named_by_their_stage() -> None:
    held = [
        replace(WEIGHT, name="unused", is_used=False),
        WEIGHT,
        replace(WEIGHT, name="later", stages=(2,), numel=5, dtype=torch.bfloat16),
        replace(WEIGHT, name="tied", stages=(0, 2), is_shared=True),
        replace(WEIGHT, name="b"),
        replace(WEIGHT, name="frozen", is_trained=False),
    ]
    of = {0: StateShards(2, 2, 2), 2: StateShards(1, 1, 4)}
    found = plan_buckets(held, of.__getitem__)
    assert {b.name: b.members for b in found} == {
        "0:0": ("a", "b"), "0:1": ("frozen",), "0:2": ("unused",), "0+2:0": ("tied",),
        "2:0": ("later",),
    }  # fmt: skip
    first, last = found[0], found[-1]
    assert (first.numel, first.dtype, first.shards) == (20, torch.float32, of[0])
    assert (last.stages, last.numel, last.dtype, last.shards) == ((2,), 5, torch.bfloat16, of[2])
    assert [b.name for b in found if b.is_shared] == ["0+2:0"]
    assert [b.name for b in found if not b.is_trained] == ["0:1"]


def test_frozen_parameters_that_stay_whole_are_in_no_bucket() -> None:
    frozen = replace(WEIGHT, is_trained=False)
    assert plan_buckets([frozen], lambda _: StateShards(1, 1, 4)) == ()
    assert plan_buckets([WEIGHT], lambda _: UNSHARDED)[0].members == ("a",)


def test_little_state_is_in_small_buckets() -> None:
    def sizes(count: int, each_bytes: int, scale: int = 1) -> list[int]:
        held = [replace(WEIGHT, name=str(k), numel=each_bytes // 4) for k in range(count)]
        shards = replace(UNSHARDED, bucket_scale=scale)
        return [4 * b.numel for b in plan_buckets(held, lambda _: shards)]

    mega = 1 << 20
    assert sizes(1000, mega) == [25 * mega] * 40
    assert sizes(32, mega) == [4 * mega] * LEAST_BUCKETS  # not one of 25 and one of 7
    assert sizes(16, mega // 4) == [mega] * 4
    assert sizes(1000, mega, 4) == [100 * mega] * 10
    for count, scales in ((100, (1,)), (1000, (1, 4, 16)), (300, (1, 4))):
        assert bucket_scales(count * mega) == scales
        assert sizes(count, mega, scales[-1]) == sizes(count, mega, 64)  # no larger ones matter


def test_weights_of_experts_are_apart() -> None:
    """However many there are, others have the names that they have on other ranks of experts."""
    expert = replace(WEIGHT, name="e", of_experts=True)
    held = [expert, WEIGHT, replace(expert, name="f"), replace(WEIGHT, name="b", is_used=False)]
    given = StateShards(1, 8, 8)
    found = plan_buckets(held, lambda _: given, dp=4)
    assert [(b.name, b.members, b.shards, b.of_experts) for b in found] == [
        ("0:0", ("a",), given, False),
        ("0:1", ("b",), given, False),
        ("0:experts:0", ("e", "f"), StateShards(1, 4, 4), True),
    ]
    frozen = replace(expert, is_trained=False)
    assert plan_buckets([frozen], lambda _: StateShards(2, 2, 2), dp=1) == ()
