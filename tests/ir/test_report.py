"""The figures that a report works out of its own."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pydantic
import pytest

from merakc.ir.report import (
    Alternative,
    Alternatives,
    AxisTraffic,
    RankMemory,
    Refusal,
    Report,
    Verdict,
)
from merakc.ir.state import StateShards
from merakc.ir.strategy import Strategy
from tests.report.made import report

OTHER = Strategy(8, batch_size=4, micro_batches=4, state_shards=(StateShards(1, 1, 8),))
OTHERS = Alternatives(
    (Alternative(OTHER, 0.25, 1 << 30, "waits for dp"),),
    (Refusal("tp 16", "12 heads do not divide over 16 ranks", "use tp 4 or 12"),),
)
STEP = Verdict(
    step_s=2.0,
    bubble_share=0.25,
    model_flops=6 * 10**12,
    peak_flops_per_s=12e12,
    peak_source="a test",
    peak_bytes=100,
    peak_rank=1,
    memory_bytes=100,
    ranks=4,
    samples=8,
)


def test_utilization_is_of_the_whole_step_on_all_ranks() -> None:
    assert STEP.mfu == pytest.approx(0.25)
    assert replace(STEP, step_s=0.0).mfu == 0.0


def test_what_fills_the_memory_fits() -> None:
    assert STEP.fits
    assert not replace(STEP, memory_bytes=99).fits


def test_parts_of_memory_add_up() -> None:
    memory = RankMemory(0, "0F1", 2, 1, 2, 4, 8, 16, 32, 64, 128)
    assert memory.peak_bytes == 255
    assert [size for _, size in memory.parts] == [1 << k for k in range(8)]


def test_what_is_not_waited_for_is_hidden() -> None:
    assert AxisTraffic("dp", 2, "", 0, 10, 4.0, 1.0).hidden_share == pytest.approx(0.75)
    assert AxisTraffic("dp", 2, "", 0, 0, 0.0, 0.0).hidden_share == 0.0


def test_a_report_comes_back_from_json() -> None:
    text = json.dumps(asdict(report()))
    assert pydantic.TypeAdapter(Report).validate_python(json.loads(text)) == report()


def test_alternatives_come_back_from_json() -> None:
    text = json.dumps(asdict(OTHERS))
    found = pydantic.TypeAdapter(Alternatives).validate_python(json.loads(text))
    assert found == OTHERS


def test_alternatives_are_empty_where_nothing_is_said() -> None:
    assert Alternatives() == Alternatives((), ())
