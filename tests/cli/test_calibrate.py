"""`merakc calibrate`, as a shell sees it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from merakc.cli import calibration
from merakc.cli.app import app
from merakc.cli.calibrate import hardware_table
from merakc.machines.cluster import Factors, Hardware
from merakc.machines.cluster_files import load_cluster, preset
from tests.costs.test_fitted import ledger
from tests.ir.test_ledger import line_text


def run(*arguments: str, code: int = 0) -> str:
    found = CliRunner().invoke(app, list(arguments))
    assert found.exit_code == code, found.output
    return found.output


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "SIDES", (32, 64))
    monkeypatch.setattr(calibration, "SEQUENCES", (64,))
    monkeypatch.setattr(calibration, "LENGTHS", (256, 1 << 16))
    monkeypatch.setattr(calibration, "MESSAGE_BYTES", (256, 1 << 16))
    monkeypatch.setattr(calibration, "LEAST_S", 0.001)


def runs(folder: Path, *factors: float) -> list[str]:
    """Ledgers of runs whose forwards take so many times what formulas say."""
    found = []
    for k, factor in enumerate(factors):
        made = ledger(factor, 1.0, 1.0, 1.0)
        text, digest = line_text(made.header, "")
        lines = [text]
        for number in range(4):
            text, digest = line_text(replace(made.steps[0], step=number), digest)
            lines.append(text)
        path = folder / f"{k}.jsonl"
        path.write_text("".join(lines))
        found.append(str(path))
    return found


@pytest.mark.usefixtures("few")
def test_a_measured_machine_can_be_planned_for(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    printed = run("calibrate", "-o", str(file), "--ranks", "2", "--device", "cpu")
    for text in ("launch", "links", "together", "product", "attention", "float64", "written to"):
        assert text in printed
    hardware = load_cluster(file)
    assert hardware.nodes[0].devices == 2
    plan = tmp_path / "plan.json"
    asked = ("plan", "tests.small_source:small", "--batch", "8", "--pp", "2", "-o", str(plan))
    run(*asked, "--cluster", str(file))
    page = tmp_path / "page.html"
    run("show", str(plan), "--html", str(page))
    assert "measured by merakc calibrate" in page.read_text()


@pytest.mark.usefixtures("few")
def test_json_is_the_hardware(tmp_path: Path) -> None:
    printed = run("calibrate", "-o", str(tmp_path / "m.toml"), "--device", "cpu", "--json")
    found = json.loads(printed[printed.index("{") : printed.rindex("}") + 1])
    assert found["nodes"][0]["device"]["profile"]["traffic"]


def test_runs_correct_the_model(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    one, two = runs(tmp_path, 1.0, 4.0)
    printed = run("calibrate", "--from", one, "--from", two, "-o", str(file))
    assert "2.000" in printed
    hardware = load_cluster(file)
    assert hardware.factors.forward == pytest.approx(2.0)
    assert replace(hardware, factors=Factors()) == preset("cpu")
    assert json.loads(_json(run("calibrate", "--from", one, "-o", str(file), "--json")))["factors"]


def _json(printed: str) -> str:
    return printed[printed.index("{") : printed.rindex("}") + 1]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--device", "tpu"), "--device tpu: is not known"),
        (("--device", "cuda"), "there is no GPU that torch can use"),
        (
            ("--from", "none.jsonl"),
            "none.jsonl: not a readable ledger (No such file or directory); give the file that",
        ),
        (("--device", "cpu", "-o", "no/such/folder/c.toml"), "give another path"),
    ],
)
@pytest.mark.usefixtures("few")
def test_what_cannot_be_used_is_one_message(
    arguments: tuple[str, ...], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    printed = run("calibrate", *arguments, code=2)
    assert text in " ".join(printed.split())
    assert "Traceback" not in printed


def test_a_table_of_what_was_measured(tmp_path: Path) -> None:
    made: Hardware = preset("cpu")
    with pytest.raises(AssertionError):  # a preset was not measured
        hardware_table(made)
