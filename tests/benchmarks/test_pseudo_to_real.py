from __future__ import annotations

from pathlib import Path

import pytest

import merakc
from benchmarks import pseudo_to_real
from benchmarks.pseudo_to_real import experts, planned, plot, train, training_table


def test_three_ways_train_and_one_is_untied(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(pseudo_to_real, "small_gpt", lambda: small())
    runs = train(0.2, 0.0, 1)
    counts = [len(list(run.model.parameters())) for run in runs]
    assert counts[0] == counts[2] > counts[1]
    assert all(run.steps and len(run.curve) == 2 for run in runs)
    assert training_table(runs).row_count == 3
    plot(tmp_path / "losses.png", runs)
    assert (tmp_path / "losses.png").stat().st_size


small_gpt = pseudo_to_real.small_gpt


def small() -> object:
    return small_gpt(layers=2, width=8)


def test_what_layers_share_is_planned_once() -> None:
    model = experts(layers=4, experts=512)
    real = planned(model, "real", devices=8)
    merakc.share_layers(model)
    pseudo = planned(model, "pseudo", devices=8)
    assert real[3:] == ("no", "", "")
    assert pseudo[3] == "yes"
    assert float(real[1]) > 3.9 * float(pseudo[1])
