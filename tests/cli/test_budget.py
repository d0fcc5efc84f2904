"""`merakc budget`, as a shell sees it."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from merakc.cli.app import app
from merakc.cli.console import NO, STOPPED, UNUSABLE
from merakc.planner.offers import Case, Offer, Offers

ASKED = ["budget", "tests.small_source:small", "--precision", "none", "--batch", "64"]


def run(*arguments: str, code: int = 0, width: int = 200) -> str:
    found = CliRunner().invoke(app, [*ASKED, *arguments], env={"COLUMNS": str(width)})
    assert found.exit_code == code, found.output
    return found.stdout if code in (0, STOPPED) else found.output


def test_combinations_side_by_side(tmp_path: Path) -> None:
    table, picture = tmp_path / "a.csv", tmp_path / "a.png"
    goal = ("--tokens", "1B", "--price", "2.5,1.5", "--cluster", "h100,a100-80")
    files = ("--csv", str(table), "--plot", str(picture))
    printed = run("--ranks", "1:2", "--batch", "32,64", *goal, *files)
    for text in ("machines", "days", "kWh", "price", "fastest", "cheapest", "least energy"):
        assert text in printed
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    asked = [(r["machines"], r["ranks"], r["batch_size"]) for r in rows]
    assert asked == [(m, n, b) for m in ("h100", "a100-80") for n in "12" for b in ("32", "64")]
    prices = {"h100": 2.5, "a100-80": 1.5}
    for row in rows:
        assert float(row["price"]) == pytest.approx(
            prices[row["machines"]] * float(row["device_hours"])
        )
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_fewest_devices_and_what_lies_near_degrees() -> None:
    (found,) = json.loads(run("--json"))
    assert found["ranks"] == 1  # that is enough
    rows = json.loads(run("--ranks", "4", "--tp", "2", "--near", "--json"))
    assert [row["tp"] for row in rows] == [2, 1, 4]
    (kept,) = json.loads(run("--ranks", "1", "--mfu", "1e-9", "--json"))
    assert kept["batch_size"] == 1
    assert "%: MISSED" not in run("--ranks", "1", "--mfu", "1e-9")
    assert "%: MISSED" in run("--ranks", "1", "--mfu", "0.999")


def test_ctrl_c_shows_what_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Offers.of

    def of(self: Offers, case: Case) -> Offer:
        if case.ranks == 2:
            raise KeyboardInterrupt
        return real(self, case)

    monkeypatch.setattr(Offers, "of", of)
    found = CliRunner().invoke(app, [*ASKED, "--ranks", "1,2"], env={"COLUMNS": "200"})
    assert found.exit_code == STOPPED
    assert "samples per day" in found.stdout
    assert "stopped after 1 of 2" in found.stderr
    found = CliRunner().invoke(app, [*ASKED, "--ranks", "2,1"])
    assert found.exit_code == STOPPED
    assert "stopped before there was anything to show" in found.stderr


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--ranks", "64:8"), "--ranks 64:8: 64 is more than 8; give 8:64"),
        (("--ranks", "8:0"), "--ranks 8:0: give numbers above 0"),
        (("--batch", "0"), "--batch 0: give numbers above 0"),
        (("--tokens", "many"), "'many' is no number of tokens"),
        (("--price", "1,2"), "2 prices for 1 kind of machines"),
        (("--price", "dear"), "--price dear: give a number, or one for each"),
        (("--mfu", "40"), "give a share between 0 and 1"),
        (("--near",), "give the degrees that it is about"),
        (("--plot", "a.txt"), "must end with one of .png"),
        (("--ranks", "1", "--cluster", "moon"), "moon: cannot be read as a cluster file"),
        (("--ranks", "3", "--tp", "2"), "tp=2 does not multiply to 3 ranks"),
    ],
)
def test_what_cannot_be_used_is_one_message(arguments: tuple[str, ...], text: str) -> None:
    assert text in " ".join(run(*arguments, code=UNUSABLE).split())


def test_a_row_without_a_plan_does_not_hide_the_others() -> None:
    found = CliRunner().invoke(app, [*ASKED, "--ranks", "3,4", "--tp", "2"])
    assert found.exit_code == 0
    assert "tp=2 does not multiply to 3 ranks" in " ".join(found.stderr.split())


def test_what_fits_nowhere_is_an_answer(tmp_path: Path) -> None:
    path = tmp_path / "tiny.toml"
    path.write_text(
        'name = "tiny"\n[[nodes]]\ndevice = "tiny"\ndevices = 2\n[devices.tiny]\n'
        "peak_flops_per_s = {float32 = 1e12}\nbytes_per_s = 1e11\nmemory_bytes = 200\n"
        '[[links]]\nname = "wire"\ndevices = 2\nbytes_per_s = 1e10\n'
    )
    assert "nothing fits" in " ".join(run("--cluster", str(path), code=NO).split())
