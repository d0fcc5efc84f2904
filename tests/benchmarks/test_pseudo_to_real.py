from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

import merakc
from benchmarks import pseudo_to_real
from benchmarks.pseudo_to_real import experts, planned, plot, small_gpt, train, training_table


def test_three_ways_train_and_one_is_untied(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(pseudo_to_real, "small_gpt", partial(small_gpt, layers=2, width=8))
    runs = train(0.2, 0.0, 1)
    counts = [len(list(run.model.parameters())) for run in runs]
    assert counts[0] == counts[2] > counts[1]
    assert all(run.steps and len(run.curve) == 2 for run in runs)
    assert training_table(runs).row_count == 3
    plot(tmp_path / "losses.png", runs)
    assert (tmp_path / "losses.png").stat().st_size


def test_what_layers_share_is_planned_once() -> None:
    model = experts(layers=8, experts=1280)
    real = planned(model, "real", devices=64)
    merakc.share_layers(model)
    pseudo = planned(model, "pseudo", devices=64)
    assert real[3:] == ("no", "", "")
    assert pseudo[3] == "yes"
    assert float(real[1]) > 7.5 * float(pseudo[1])
