"""Tables that were kept come back as they were."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import typer

from benchmarks.peers.plans import training_of
from benchmarks.peers.results import Result
from benchmarks.peers.rounds import Entry, Row
from benchmarks.peers.store import Store
from benchmarks.peers.training import Training

BASE = Training()
ENTRY = Entry("merakc_plan", "auto", "merakc")
ROW = Row(
    "loopback", ENTRY, steps_s=(0.1, 0.2), peaks_bytes=(7, 9), error=1e-6, gradient_error=1e-5
)
FAILED = Row("loopback", ENTRY, failure="no memory")
TABLE = Result("pp2", "loopback", training_of("pp2", BASE), (ROW, FAILED), (7, 7))


def test_tables_come_back(tmp_path: Path) -> None:
    store = Store(tmp_path / "x.json", {"steps": 2})
    store.start_s -= 100
    store.keep([TABLE], ["a peer is missing"])
    again = Store(tmp_path / "x.json", {"steps": 2})
    (found,) = again.tables(BASE)
    assert found.training == TABLE.training
    assert (found.rows[0].steps_s, found.rows[0].entry) == (ROW.steps_s, ENTRY)
    assert found.rows[0].peak_bytes == 8
    assert found.rows[1].failure == "no memory"
    assert math.isnan(found.rows[1].error)
    assert again.wall_s > 100
    assert json.loads((tmp_path / "x.json").read_text())["notes"] == ["a peer is missing"]


@pytest.mark.parametrize(("base", "steps"), [(Training(hidden=64), 2), (BASE, 3)])
def test_tables_of_another_comparison_are_refused(
    base: Training, steps: int, tmp_path: Path
) -> None:
    Store(tmp_path / "x.json", {"steps": 2}).keep([TABLE])
    with pytest.raises(typer.BadParameter, match="another comparison"):
        Store(tmp_path / "x.json", {"steps": steps}).tables(base)


@pytest.mark.parametrize("path", [None, Path("/nowhere/x.json")])
def test_what_is_not_there_is_said(path: Path | None) -> None:
    store = Store(path, {})
    with pytest.raises(typer.BadParameter, match="there is none"):
        store.tables(BASE)
    if path is None:
        store.keep([TABLE])  # nowhere
