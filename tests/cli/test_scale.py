"""`merakc scale`, as a shell sees it."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from merakc.cli.app import app
from merakc.cli.console import STOPPED

SMALL = [
    "scale",
    "tests.small_source:small",
    "--to",
    "32",
    "--per-rank",
    "2",
    "--precision",
    "none",
]


def run(*arguments: str, code: int = 0) -> str:
    found = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})
    assert found.exit_code == code, found.output
    return found.output


def test_a_sweep(tmp_path: Path) -> None:
    table, picture = tmp_path / "a.csv", tmp_path / "a.png"
    printed = run(*SMALL, "--csv", str(table), "--plot", str(picture))
    assert all(f" {count} " in printed for count in (8, 16, 32))
    assert len(table.read_text().splitlines()) == 4
    assert picture.read_bytes().startswith(b"\x89PNG")
    points = json.loads(run(*SMALL, "--json", "--tp", "1"))
    assert [p["ranks"] for p in points] == [8, 16, 32]
    assert {p["tp"] for p in points} == {1}
    points = json.loads(run(*SMALL, "--json", "--dp", "4", "--state-shards", "1,1,4"))
    assert {p["dp"] for p in points} == {4}
    stopped = run(*SMALL, "--limit", "0.01", code=STOPPED)
    assert "stopped before there was anything to show" in stopped


def test_the_table_can_be_read_on_a_narrow_terminal() -> None:
    found = CliRunner().invoke(app, SMALL, env={"COLUMNS": "80"})
    assert "…" not in found.output
    assert max(map(len, found.output.splitlines())) <= 80
    _, _, below = found.output.partition("─ \n")
    rows = [line.split() for line in below.splitlines() if line.strip()]
    assert [row[0] for row in rows] == ["8", "16", "32"]


def test_what_cannot_be_used_is_one_message() -> None:
    for more, text in (
        (("--batch", "8"), "give one of --batch, samples a step over all devices"),
        (("--from", "64"), "more than --to"),
        (("--plot", "a.txt"), "must end with one of .png"),
        (("--cluster", "moon"), "moon: cannot be read as a cluster file"),
    ):
        printed = run(*SMALL, *more, code=2)
        assert text in " ".join(printed.split())


def test_sizes_on_which_nothing_fits_are_passed_over(tmp_path: Path) -> None:
    found = CliRunner().invoke(app, [*SMALL, "--from", "1", "--to", "2", "--tp", "2", "--json"])
    assert found.exit_code == 0
    assert "no plan for 1 device" in " ".join(found.stderr.split())
    assert [p["ranks"] for p in json.loads(found.stdout) if not p["error"]] == [2]
