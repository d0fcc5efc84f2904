"""Every way to damage a checkpoint is seen; what is not seen is told."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

import merakc
from benchmarks.checkpoints import corruptions
from tests.train.checkpoints.small_runs import trained


def test_all_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("older", "good"):
        model, optimizer = trained(1 if name == "good" else 2)
        merakc.save(tmp_path / name, model, optimizer)
    for way in set(corruptions.WAYS):
        monkeypatch.setattr(corruptions, "WAYS", (way,))
        for seed in range(4):
            pick = random.Random(seed)
            assert not corruptions.corrupted(tmp_path / "good", tmp_path, pick, model, optimizer)
    monkeypatch.setattr(corruptions, "WAYS", (lambda folder, pick: "nothing",))
    told = corruptions.corrupted(tmp_path / "good", tmp_path, pick, model, optimizer)
    assert told == "nothing: loaded"
