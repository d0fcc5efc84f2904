"""Degrees to check a plan on: its own where ranks last, and otherwise few of each axis."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from merakc.equality.lower import lost, lower_strategy, replicas
from merakc.errors import ConfigError
from merakc.ir.plan import Plan
from merakc.ir.program import Mesh
from merakc.ir.state import StateShards
from tests.ir.test_plan import PLAN

# One stage a rank, of a plan of tests/ir.
BASE = replace(PLAN, tp=1, splits={}, batch_size=16, micro_batches=8)


def _large(**more: Any) -> Plan:
    return replace(BASE, **more)


def test_degrees_that_fit_stay() -> None:
    plan = _large(dp=1, tp=4, pp=2, micro_batches=3)
    strategy = lower_strategy(plan, 8)
    assert (strategy.mesh, strategy.micro_batches) == (Mesh(1, 4, 2), 3)
    assert lost(plan, strategy) == ()


def test_degrees_are_lowered_to_two_and_to_the_ranks() -> None:
    plan = _large(dp=16, tp=8, pp=4, micro_batches=64)
    strategy = lower_strategy(plan, 8)
    assert (strategy.mesh, strategy.micro_batches) == (Mesh(2, 2, 2), 4)
    few = lower_strategy(plan, 4)
    assert few.mesh == Mesh(1, 2, 2)
    assert lost(plan, few) == ("dp=16",)
    assert lower_strategy(plan, 1).mesh == Mesh(1, 1, 1)
    assert lost(plan, lower_strategy(plan, 1)) == ("dp=16", "tp=8", "pp=4")


def test_levels_of_shards_are_kept_while_ranks_last() -> None:
    shards = (StateShards(2, 2, 4), StateShards(1, 4, 4))
    plan = _large(dp=8, tp=2, pp=2, state_shards=shards)
    strategy = lower_strategy(plan, 16)
    assert strategy.mesh.world_size <= 16
    many = lower_strategy(plan, 31)
    assert many.mesh == Mesh(4, 2, 2)
    assert many.state_shards == shards
    assert lost(plan, many) == ("shards of the state at more than 4 ranks",)
    assert lower_strategy(replace(plan, tp=1), 16).state_shards == shards
    assert lost(plan, lower_strategy(replace(plan, tp=1), 16)) == ("tp=2",)


def test_an_order_of_work_needs_its_ranks() -> None:
    plan = _large(order=("0F0 0B0", "1F0 1B0"), dp=8)
    with pytest.raises(ConfigError, match="for 2 pipeline ranks, and there are 1; give --ranks 2"):
        lower_strategy(plan, 1)
    strategy = lower_strategy(plan, 2)
    assert (strategy.mesh, strategy.micro_batches) == (Mesh(1, 1, 2), 8)


def test_dp_is_run_alone_where_it_has_no_place_beside_the_others() -> None:
    shards = (StateShards(1, 4, 4), StateShards(1, 1, 1))
    plan = _large(dp=4, tp=2, pp=2, state_shards=shards)
    few = lower_strategy(plan, 4)
    assert few.mesh.dp == 1
    alone = replicas(plan, few, 4)
    assert alone is not None
    assert (alone.mesh, alone.micro_batches, alone.stage_count) == (Mesh(2, 1, 1), 2, 1)
    assert alone.state_shards == (StateShards(1, 2, 2),)
    assert lost(plan, few, alone) == ()
    assert replicas(plan, lower_strategy(plan, 16), 16) is None
    assert replicas(plan, lower_strategy(plan, 1), 1) is None
    assert replicas(replace(plan, dp=1), few, 4) is None
