"""Cost tables: what stands where nothing was said, and that they are values."""

from __future__ import annotations

import dataclasses

import pytest

from merakc.ir.costs import CostTable, StageCost


def test_what_is_not_said_costs_nothing() -> None:
    cost = StageCost(forward_s=1.0, backward_s=2.0)
    said = {"forward_s": 1.0, "backward_s": 2.0}
    assert dataclasses.asdict(cost) == dict.fromkeys(dataclasses.asdict(cost), 0) | said


def test_a_table_is_a_value() -> None:
    table = CostTable((StageCost(1.0, 2.0),), p2p_latency_s=1e-5, p2p_bytes_per_s=1e9)
    same = CostTable((StageCost(1.0, 2.0),), p2p_latency_s=1e-5, p2p_bytes_per_s=1e9)
    assert table == same
    assert hash(table) == hash(same)
    assert table != dataclasses.replace(table, source="measured")
    with pytest.raises(dataclasses.FrozenInstanceError):
        table.p2p_latency_s = 0.0  # type: ignore[misc]


def test_every_number_carries_its_unit() -> None:
    for field in (*dataclasses.fields(StageCost), *dataclasses.fields(CostTable)):
        if field.name not in (
            "stages", "source", "overlap", "copied", "collectives", "sharing", "ranks", "far",
            "crossing", "mesh",
        ):  # fmt: skip
            assert field.name.endswith(("_s", "_bytes")), field.name
