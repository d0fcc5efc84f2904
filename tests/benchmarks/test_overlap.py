from __future__ import annotations

import io
import os
from dataclasses import replace

import pytest
from rich.console import Console

from benchmarks import overlap
from benchmarks.overlap import Row, complaints, document, rows_table
from benchmarks.overlap_steps import Run, Size
from benchmarks.peers.networks import NetworkError

SMALL = Size(layers=1, hidden=64, sequence=16, samples=4)
BLOCKING = Run(0, 2.0, 1.0, 1.0, 0.1, 2.0, 1.0, 1 << 20, 0.0)
PARTS = Run(2, 1.25, 1.1, 1.0, 0.1, 1.2, 1.1, 1 << 20, 0.0)
ROW = Row("llama", "waits", 0.45, 10**9, (BLOCKING, PARTS))


def test_what_is_hidden() -> None:
    assert BLOCKING.hidden == 0
    assert PARTS.hidden == pytest.approx(0.85)
    assert ROW.share == 0.5
    assert ROW.speedup == 1.6
    assert complaints([ROW]) == []


def test_what_falls_short_is_named() -> None:
    slow = replace(PARTS, step_s=1.6, simulated_s=1.2)
    lines = complaints([replace(ROW, runs=(BLOCKING, slow))])
    assert [line.partition(": ")[0] for line in lines] == [
        "llama, kernels waits, at 45%", "llama, kernels waits, at 45%",
        "llama, kernels waits, at 45%, 2 parts",
    ]  # fmt: skip
    on_cpu = complaints([replace(ROW, kernels="cpu", runs=(BLOCKING, slow))])
    assert [line.partition(": ")[2] for line in on_cpu] == ["1.25x over blocking steps"]
    assert (
        complaints(
            [replace(ROW, wanted_share=0.6, runs=(BLOCKING, replace(slow, simulated_s=1.6)))]
        )
        == []
    )


def test_the_table_has_a_line_for_each_form() -> None:
    page = io.StringIO()
    Console(file=page, width=150).print(rows_table([ROW]))
    assert "blocking" in page.getvalue()
    assert "2 parts" in page.getvalue()
    assert "1.60" in page.getvalue()


def test_the_page_has_the_table_and_what_was_missed() -> None:
    page = document([ROW], ["llama misses"], SMALL)
    assert "| llama | waits | 50% | 1000 Mbit/s | blocking | 2000 ms |" in page
    assert "- llama misses" in page


def test_where_no_network_can_be_made_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(overlap, "measure", lambda *_, **named: (BLOCKING,))
    with pytest.raises(NetworkError, match="root"):
        list(overlap.rows(["llama"], "cpu", SMALL, [0.45], [2], 1, Console(file=io.StringIO())))
