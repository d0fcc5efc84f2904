from __future__ import annotations

from dataclasses import replace

import pytest
from rich.console import Console

from benchmarks import host_link
from benchmarks.host_link import BEHIND, UNDER, Row, linked, measured, rows, texts_of
from benchmarks.overlap_steps import Size
from merakc.ir.offload import ACTIVATIONS, PARAMETERS

ROW = Row(ACTIVATIONS, 1.0, 0.5, 1 << 20, 1 << 21, step_s=1.02, simulated_s=1.0, without_s=1.0)


def test_what_is_asked_for() -> None:
    assert ROW.passed
    assert not replace(ROW, step_s=1.04).passed  # half, and not hidden
    assert replace(ROW, step_s=1.04, ratio=1.5).passed
    assert replace(ROW, step_s=1.04, share=1.0).passed
    assert not replace(ROW, simulated_s=1.1, share=1.0).passed
    fetched = replace(ROW, kind=PARAMETERS, share=1.0, step_s=1.04)
    assert fetched.passed
    assert not replace(fetched, ratio=0.5).passed
    under = replace(ROW, kind=UNDER, ratio=0.25)
    assert under.passed
    assert not replace(under, step_s=1.06).passed
    assert replace(under, kind=BEHIND, step_s=1.06, simulated_s=1.06).passed


def test_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Moves take the link as long as they should, on a device that only waits."""
    monkeypatch.setattr(host_link, "SIZE", Size(layers=2, hidden=64, sequence=64, samples=4))
    monkeypatch.setattr(host_link, "RATIOS", (0.2, 8.0))
    monkeypatch.setattr(host_link, "SHARES", (1.0,))
    monkeypatch.setattr(host_link, "FETCHED_RATIOS", (0.2, 8.0))
    monkeypatch.setattr(host_link, "UPDATE_RATIOS", (0.5,))
    hidden, waits, come, late, behind, under = rows(1, Console(quiet=True))
    assert 0 < hidden.host_bytes == waits.host_bytes
    assert waits.step_s > 7 * waits.without_s > 2 * hidden.step_s
    assert 0 < come.host_bytes == late.host_bytes
    assert (
        late.step_s > 2 * late.without_s > come.step_s
    )  # its two buckets stay once they are there
    # One bucket comes last, and hides nothing.
    assert behind.simulated_s == pytest.approx(under.simulated_s)
    assert min(behind.step_s, under.step_s) > 1.2 * under.without_s
    assert [len(row) for row in texts_of([hidden, late])] == [9, 9, 9]


def test_nothing_moves_where_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_link, "SIZE", Size(layers=1, hidden=64, sequence=16, samples=2))
    step_s, lowered = measured(linked(1e9), "none", 1)
    assert step_s > 0
    assert not lowered.plan.host_activations
