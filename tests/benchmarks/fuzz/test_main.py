"""Damaged files of every kind, as many as take some seconds."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from benchmarks.fuzz import __main__ as module
from benchmarks.fuzz.__main__ import REFUSED, TAKEN, fuzz, judge
from benchmarks.fuzz.subjects import Subject
from merakc.errors import PlanError


def test_a_few_of_every_kind() -> None:
    console = Console(file=io.StringIO())
    found = fuzz(300, 5, console)
    assert [fault for own in found.values() for fault in own.faults] == []
    assert set(found) == {"plan", "cluster", "ledger", "config", "manifest"}
    assert all(own.outcomes[REFUSED] for own in found.values())
    assert "refused" in str(module.table(found).columns[2].header)


def reads(path: Path) -> object:
    text = path.read_text(encoding="utf-8")
    if "refuse" in text:
        raise PlanError("no")
    return {"value": 1} if "other" in text else eval(text)


def test_what_is_wrong_is_seen(tmp_path: Path) -> None:
    for text, outcome, fault in (
        ("{'value': 1}", TAKEN, ""),
        ("refuse", REFUSED, ""),
        ("{'value': 2} # other", "faults", "x.value says '2' and is '1'"),
        ("1 / 0", "faults", "ZeroDivisionError at "),
    ):
        subject = Subject("x", "file", ("1",), reads, lambda text: eval(text), lambda path: [])
        (tmp_path / "x").mkdir(exist_ok=True)
        object.__setattr__(subject, "mutant", lambda number, text=text: text.encode())
        found, told, _ = judge(subject, 1, tmp_path)
        assert found == outcome
        assert told.startswith(fault)
