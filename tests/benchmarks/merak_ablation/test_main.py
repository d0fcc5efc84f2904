"""The table of Merak's ablation: its rows, its cluster, its files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from benchmarks.gpt import Shape
from benchmarks.merak_ablation import __main__ as merak_ablation
from benchmarks.merak_ablation.__main__ import (
    BASELINE,
    FREE,
    HEADS,
    KEPT,
    MERAK,
    MODELS,
    OURS,
    Model,
    Row,
    ablation,
    cells,
    merak_hardware,
    settings,
    summary,
)
from benchmarks.merak_ablation.plans import Setting, our_best

SMALL = Model("small", Shape(1024, 8, 8, 512, 2048), 1.5)
SETTING = Setting("two nodes' worth", merak_hardware(), 256, (4,))


def test_the_cluster_is_the_published_one() -> None:
    hardware = merak_hardware()
    assert len(hardware.devices) == 64
    assert hardware.level(4).name.startswith("PCIe")
    outside = hardware.level(5)
    assert (outside.bytes_per_s, outside.shared_by) == (100e9 / 8, 4)
    assert merak_hardware(8e9).level(4).bytes_per_s == 8e9


def test_the_models_have_their_sizes() -> None:
    for model, billions in zip(MODELS, (1.5, 2.5, 8.3, 20.0), strict=True):
        shape = model.shape
        parameters = 12 * shape.layers * shape.hidden_size**2 + shape.vocab * shape.hidden_size
        assert parameters / 1e9 == pytest.approx(billions, rel=0.05)


def test_each_row_adds_to_the_one_before() -> None:
    rows = ablation(SMALL, SETTING, our_best(SMALL.shape, SETTING, (2, 4)), (2, 4))
    by_label = {row.label: row for row in rows}
    assert [row.label for row in rows][:1] == [BASELINE]
    assert {MERAK, FREE, KEPT, OURS} <= by_label.keys()
    ratios = [row.ratio for row in rows[:5]]
    assert ratios[0] == 1.0
    assert ratios == sorted(ratios)
    assert by_label[MERAK].published == 1.5
    assert by_label[OURS].ratio > by_label[FREE].ratio
    base, merak = by_label[BASELINE].found, by_label[MERAK].found
    assert base is not None
    assert merak is not None
    assert (merak.laid.layout.tp, merak.laid.layout.pp) == (
        base.laid.layout.tp, base.laid.layout.pp,
    )  # fmt: skip
    assert merak.laid.layout.parts == 2
    assert not by_label[MERAK].same
    assert base.step_s / merak.step_s == by_label[MERAK].ratio


def test_a_model_that_fits_nowhere_says_so() -> None:
    huge = replace(SMALL, shape=Shape(16384, 64, 64, 512, 2048))
    (row,) = ablation(huge, SETTING, None, (1,))
    assert "does not fit" in cells(row, SETTING)
    assert len(cells(row, SETTING)) == len(HEADS)


def test_tables_of_markdown() -> None:
    row = Row(MODELS[0].name, MERAK, None, 1.25)
    text = summary([(SETTING, [row])])
    assert "| two nodes' worth | Merak's three | 1.25 | – | – | – |" in text
    assert "| published | Merak | 1.42 | 1.39 | 1.43 | 1.61 |" in text


def test_the_settings_share_all_but_what_they_name() -> None:
    usual, whole, staged, few = settings()
    assert usual.hardware == whole.hardware == few.hardware != staged.hardware
    assert usual.batch == whole.batch == staged.batch > few.batch
    assert whole.tps == staged.tps == few.tps == (4,)


def test_the_command_writes_its_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(merak_ablation, "MODELS", (SMALL,))
    monkeypatch.setattr(merak_ablation, "MICRO_BATCHES", (2,))
    monkeypatch.setattr(merak_ablation, "settings", lambda: (SETTING, SETTING))
    app = typer.Typer()
    app.command()(merak_ablation.main)
    files = tmp_path / "a.json", tmp_path / "a.md"
    options = ["--models", "small", "--json", str(files[0]), "--doc", str(files[1])]
    result = CliRunner().invoke(app, options, env={"COLUMNS": "160"})
    assert result.exit_code == 0, result.output
    assert MERAK in result.output
    found = json.loads(files[0].read_text())
    assert {row["row"] for row in found} >= {BASELINE, MERAK, OURS}
    assert found[0]["degrees"]["tp"] == 4
    page = files[1].read_text()
    assert page.startswith("# Merak's ablation, simulated")
    assert f"| small | {BASELINE} | 4·" in page
