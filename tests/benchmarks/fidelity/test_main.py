"""The fidelity benchmark's figures and its command."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from benchmarks.fidelity import __main__ as fidelity
from benchmarks.fidelity.__main__ import (
    Check,
    Found,
    Learned,
    error_checks,
    learn_from,
    memory_errors,
    regret_checks,
    regrets,
    rows_table,
    vtrain_hardware,
)
from benchmarks.fidelity.data import COLUMNS, read_rows
from merakc.machines.cluster_files import preset

LINES = [
    f"{8},{16 * b},{b},256,8,{layers},128,{tp},{dp},{8 // tp // dp},{ms}"
    for b, layers, tp, dp, ms in (
        (1, 4, 1, 8, 20.0), (1, 4, 2, 4, 30.0), (1, 4, 2, 2, 40.0), (2, 8, 1, 8, 50.0),
        (2, 8, 2, 4, 60.0),
    )
]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    header = ",".join(COLUMNS)
    several = [f"16,32,1,256,8,4,128,{tp},{16 // tp},1,{40 * tp}" for tp in (1, 2, 4)]
    (tmp_path / "vtrain_single_node.csv").write_text("\n".join((header, *LINES)))
    (tmp_path / "vtrain_multi_node.csv").write_text("\n".join((header, *several)))
    row = {"model": "small", "hidden_size": 256, "layers": 4, "heads": 8, "tp": 2, "pp": 2,
           "interleave": 1, "micro_batch": 1, "global_batch": 4}  # fmt: skip
    table = {"seq_len": 128, "vocab": 512}
    core = {"model": "1.7B", "tp": 1, "pp": 1, "gpus": 8, "global_batch": 8, "step_s": 0.4}
    published = {
        "narayanan2021": {**table, "rows": [{**row, "gpus": 4, "step_s": 0.02}]},
        "korthikanti2022": {
            **table,
            "dp": 1,
            "rows": [{**row, "full_recompute_step_s": 0.02, "activations_no_recompute_gib": 0.02}],
        },
        "megatron_core_h100": {**table, "dp": 8, "rows": [core]},
    }
    (tmp_path / "published.json").write_text(json.dumps(published))
    return tmp_path


def found(folder: Path, predicted_s: list[float], fitted: int = 0) -> list[Found]:
    rows = read_rows(folder / "vtrain_single_node.csv")
    return [
        Found(row, seconds, k < fitted)
        for k, (row, seconds) in enumerate(zip(rows, predicted_s, strict=True))
    ]


def test_errors_are_those_of_rows_that_were_not_fitted(folder: Path) -> None:
    told = found(folder, [1.0, 0.033, 0.04, 0.05, 0.054], fitted=1)
    mean, worst = error_checks("x", told, 0.051, 0.12)
    assert mean.name == "x: mean error of 4 rows"
    assert mean.value == pytest.approx((0.1 + 0 + 0 + 0.1) / 4)
    assert worst.value == pytest.approx(0.1)
    assert mean.passed
    assert not Check("x", 0.13, 0.12).passed
    assert error_checks("x", told[:1], 0.05) == []


def test_the_regret_of_a_choice(folder: Path) -> None:
    # Two groups: in the first the second of three is ranked first, in the other the best one.
    told = found(folder, [0.03, 0.02, 0.04, 0.05, 0.06])
    assert regrets(told) == [pytest.approx(0.5), 0.0]
    mean, worst = regret_checks("x", told)
    assert (mean.value, worst.value) == (pytest.approx(0.25), pytest.approx(0.5))
    assert regret_checks("x", told[:1]) == []


def test_what_is_learned_fits_what_it_is_from(folder: Path) -> None:
    rows = read_rows(folder / "vtrain_single_node.csv")
    learned = learn_from(rows, 4)
    assert len(learned.fitted) == 4
    before = Learned(vtrain_hardware(rows)).find(rows)
    after = learned.find(rows)
    assert sum(f.fitted for f in after) == 4
    assert sum(abs(f.error) for f in after) < 0.5 * sum(abs(f.error) for f in before)


def test_vtrain_has_half_the_network(folder: Path) -> None:
    rows = read_rows(folder / "vtrain_multi_node.csv")
    hardware = vtrain_hardware(rows)
    assert len(hardware.devices) == 16
    assert hardware.links[1].bytes_per_s == preset("a100-80").links[1].bytes_per_s / 2


def test_activation_memory_is_compared(folder: Path) -> None:
    rows = read_rows(folder / "vtrain_single_node.csv")
    assert memory_errors(rows, preset("a100-80")) == []
    row = replace(rows[0], activation_bytes=1e6)
    ((_, held, error),) = memory_errors([row], preset("a100-80"))
    assert held / 1e6 - 1 == pytest.approx(error)


def test_every_row_is_printed(folder: Path) -> None:
    console = Console(file=io.StringIO(), width=120)
    console.print(rows_table("rows", found(folder, [0.02] * 5, fitted=2)))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert text.count("vTrain") == 5
    assert text.count("fitted") == 2
    assert "+0.0%" in text
    assert "-60.0%" in text


def test_the_command(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fidelity, "FITTED", 2)
    app = typer.Typer()
    app.command()(fidelity.main)
    other = folder / "other.csv"
    other.write_text((folder / "vtrain_single_node.csv").read_text())
    figures = folder / "figures.json"
    arguments = ["--data", str(folder), "--rows", str(other), "--json", str(figures)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1, result.output  # the rows are made up
    assert "other.csv, single node" in result.output
    told = json.loads(figures.read_text())
    assert {c["name"].partition(":")[0] for c in told["checks"]} >= {
        "vTrain, single node", "vTrain, several nodes", "vTrain", "papers",
        "other.csv, single node",
    }  # fmt: skip
    assert len(told["rows"]) == 5 + 3 + 5 + 3
    missing = CliRunner().invoke(app, ["--data", str(folder / "none")])
    assert missing.exit_code == 2
    assert "give the folder of the data with --data" in missing.output.replace("\n", " ")
