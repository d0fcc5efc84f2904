"""Compile times: a tiny model through all phases, and the limits of the 70B one."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks import compile_time
from benchmarks.compile_time import MAX_70B_BYTES, MAX_70B_S, CompileTime, measure, times_table
from benchmarks.models import MODELS

_GOOD = CompileTime("llama3-70b", 1.0, 2.0, 0.5, 10.0, 5000, 2**28, 2**30)


def test_every_phase_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(compile_time.MODELS, "tiny", (MODELS["llama"].model, 12))
    monkeypatch.setattr(compile_time, "TP", 2)
    monkeypatch.setattr(compile_time, "PP", 2)
    found = measure("tiny")
    assert min(found.build_s, found.record_s, found.shard_s, found.plan_s) > 0
    assert found.nodes > 50
    assert found.peak_bytes >= found.base_bytes > 2**26


def test_only_the_70b_model_has_limits() -> None:
    assert _GOOD.within_limits
    too_large = dataclasses.replace(_GOOD, peak_bytes=MAX_70B_BYTES + 1)
    assert not too_large.within_limits
    assert not dataclasses.replace(_GOOD, plan_s=MAX_70B_S).within_limits
    assert dataclasses.replace(too_large, model="gpt3-175b").within_limits


def test_the_table_has_a_column_a_model() -> None:
    assert [column.header for column in times_table([_GOOD]).columns] == ["", "llama3-70b"]
