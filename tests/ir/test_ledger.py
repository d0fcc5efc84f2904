"""The lines of a ledger, as they are written and read again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from merakc.errors import LedgerError
from merakc.ir import ledger
from merakc.ir.ledger import Header, Modelled, Spent, StepLine, line_text, read_ledger
from merakc.ir.plan_file import Prediction
from merakc.machines.cluster_files import preset

HEADER = Header(
    plan="abc",
    model="tiny",
    degrees={"dp": 1, "tp": 1, "pp": 2},
    micro_batches=4,
    device="cpu",
    versions={"merakc": "0"},
    hardware=preset("cpu"),
    origin="modelled",
    prediction=Prediction(0.1, 0.25, (1000, 900), (0.0, 0.0)),
    expected=(Spent(0, "F", 4, 0.04, 0.04, 0.0), Spent(1, "recv", 4, 0.01, 0.01, 0.01)),
    modelled=(Modelled(0, 0.01, 0.02, 0.001), Modelled(1, 0.01, 0.02, 0.0)),
    optimizer_s=0.002,
)
STEP = StepLine(0, 0.11, None, (Spent(0, "F", 4, 0.05, 0.06, 0.01),), (0.0, 0.0), (1100, 950))


def write(path: Path, steps: int = 3, header: Header = HEADER) -> Path:
    text, digest = line_text(header, "")
    lines = [text]
    for k in range(steps):
        text, digest = line_text(replace(STEP, step=k), digest)
        lines.append(text)
    path.write_text("".join(lines))
    return path


def test_a_ledger_reads_as_it_was_written(tmp_path: Path) -> None:
    found = read_ledger(write(tmp_path / "run.jsonl"))
    assert found.header == HEADER
    assert found.steps == tuple(replace(STEP, step=k) for k in range(3))
    assert STEP.spent[0].computed_s == pytest.approx(0.04)


def test_a_line_that_was_edited_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "run.jsonl")
    path.write_text(path.read_text().replace('"step":1,"step_s":0.11', '"step":1,"step_s":0.09'))
    with pytest.raises(LedgerError, match=r"line 3: hashes to .* edited"):
        read_ledger(path)


@pytest.mark.parametrize("gone", [0, 1, 2])
def test_a_line_that_was_removed_is_seen(tmp_path: Path, gone: int) -> None:
    path = write(tmp_path / "run.jsonl")
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:gone] + lines[gone + 1 :]))
    with pytest.raises(LedgerError, match=f"line {gone + 1}: hashes to"):
        read_ledger(path)


def test_a_ledger_that_is_cut_off_says_which_line_to_remove(tmp_path: Path) -> None:
    path = write(tmp_path / "run.jsonl")
    path.write_text(path.read_text()[:-20])
    with pytest.raises(LedgerError, match=r"line 4: is cut off.*remove that line"):
        read_ledger(path)
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:3]))
    assert len(read_ledger(path).steps) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("[1]\n", "no line of a ledger"),
        ("[" * 100_000, "no line of a ledger"),
        ('{"a": 1}\n', "hashes to"),
    ],
)
def test_what_is_no_ledger(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(text)
    with pytest.raises(LedgerError, match=message):
        read_ledger(path)
    with pytest.raises(
        LedgerError, match=r"not a readable ledger .*; give the file that auto_parallel"
    ):
        read_ledger(tmp_path / "none.jsonl")


def test_another_version_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "run.jsonl", header=replace(HEADER, ledger_version=9))
    with pytest.raises(LedgerError, match="version 9, this merakc reads 1"):
        read_ledger(path)


def test_a_line_without_what_a_step_has(tmp_path: Path) -> None:
    path = write(tmp_path / "run.jsonl", steps=0)
    digest = json.loads(path.read_text())["digest"]
    whole = json.loads(line_text(STEP, digest)[0])
    with pytest.raises(TypeError):
        StepLine(**{k: v for k, v in whole.items() if k not in ("step_s", "digest")})
    other = line_text(HEADER, digest)[0]  # of another kind, with a digest that is right
    path.write_text(path.read_text() + other)
    with pytest.raises(LedgerError, match=r"line 2: step: Field required"):
        read_ledger(path)


@pytest.mark.parametrize(
    "wrong",
    [
        Spent(0, "X", 4, 0.05, 0.06, 0.01),
        Spent(0, "F", 0, 0.05, 0.06, 0.01),
        Spent(0, "F", 4, float("inf"), 0.06, 0.01),
    ],
)
def test_what_no_run_writes_is_refused(wrong: Spent, tmp_path: Path) -> None:
    path = write(tmp_path / "run.jsonl", header=replace(HEADER, expected=(wrong,)))
    with pytest.raises(LedgerError, match=r"line 1: .*which no run writes"):
        read_ledger(path)


def test_a_key_that_stands_twice_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "run.jsonl")
    path.write_text(path.read_text().replace('"step":1,', '"step":7,"step":1,'))
    with pytest.raises(LedgerError, match="line 3: is cut off, or no line of a ledger"):
        read_ledger(path)


@pytest.mark.parametrize(
    ("change", "told"),
    [({"more": 1}, "more has no meaning"), ({"step_s": "1.5"}, "step_s is '1.5', where float")],
)
def test_nothing_is_passed_over_or_taken_for_a_number(
    change: dict[str, object], told: str, tmp_path: Path
) -> None:
    path = tmp_path / "run.jsonl"
    header, _ = line_text(HEADER, "")
    first = json.loads(header)
    before = first.pop("digest")
    line, _ = line_text(STEP, before)
    body = {**json.loads(line), **change}
    del body["digest"]
    digest = ledger._digest(body, before)
    path.write_text(header + json.dumps({**body, "digest": digest}) + "\n")
    with pytest.raises(LedgerError, match=told):
        read_ledger(path)
