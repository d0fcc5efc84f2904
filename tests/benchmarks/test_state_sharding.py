"""The benchmark of sharded state: its entries, what it complains of, its page and exit status."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from benchmarks import state_sharding
from benchmarks.peers import plans
from benchmarks.peers.environments import MissingPeerError
from benchmarks.peers.networks import Network
from benchmarks.peers.rounds import Course, Entry, Row
from benchmarks.state_sharding import MERAKC, SHARDINGS, complaints, document, entries

PEERS = (MERAKC, "torch_ddp", "fsdp2", "deepspeed_zero")


def row(peer: str, step_s: float, **fields: Any) -> Row:
    entry = Entry(peer, "zero-1", peer)
    made = Row("loopback", entry, steps_s=(step_s, step_s * 1.1), error=1e-5, with_s=step_s)
    return replace(made, **({"without_s": step_s - 0.1, "alone_s": 0.4} | fields))


def test_every_sharding_has_its_peers() -> None:
    found = entries(PEERS, SHARDINGS)
    assert [e.peer for e in found if e.form == "zero-2"] == [MERAKC, "fsdp2", "deepspeed_zero"]
    assert len(found) == 12
    assert {e.peer for e in entries((MERAKC, "fsdp2"), SHARDINGS)} == {MERAKC, "fsdp2"}


def test_complains_of_what_is_wrong() -> None:
    own = row(MERAKC, 1.0)
    assert complaints([own, row("fsdp2", 1.0)]) == []
    assert complaints([own, row("fsdp2", 0.985)]) == []  # within the tolerance
    assert "takes 0.90 of merakc's time" in complaints([own, row("fsdp2", 0.9)])[0]
    assert "weights are 1.0e-02" in complaints([own, row("fsdp2", 1.0, error=0.01)])[0]
    assert "weights" in complaints([own, row("fsdp2", 1.0, error=float("nan"))])[0]
    assert complaints([own, row("fsdp2", 1.0, steps_s=(), failure="x")]) == []
    assert "died" in complaints([replace(own, steps_s=(), failure="died")])[0]


def test_the_page_holds_the_figures() -> None:
    rows = [row(MERAKC, 1.0), row("fsdp2", 1.5), row("deepspeed_zero", 1.0, steps_s=())]
    page = document(rows, ["a note"], "about")
    assert "| zero-1 | merakc_state | 1050 ms |  | 0.75 | 100 ms | 400 ms | 1e-05 |" in page
    assert "| zero-1 | fsdp2 | 1575 ms | 1.50 (1.50 to 1.50) | 0.75 | 100 ms | 400 ms |" in page
    assert "| zero-1 | deepspeed_zero | missing |" in page
    assert "- a note\n" in page


@pytest.mark.parametrize(("peer_s", "code"), [(1.2, 0), (0.8, 1)])
def test_exit_status_and_files(
    peer_s: float, code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def measure(
        self: Course, network: Network, found: list[Entry], rounds: int, steps: int
    ) -> list[Row]:
        return [
            replace(row(e.peer, 1.0 if e.peer == MERAKC else peer_s), entry=e, network=network.name)
            for e in found
        ]

    def missing(cache: Path) -> None:
        raise MissingPeerError("no wheel")

    monkeypatch.setattr(Course, "measure", measure)
    monkeypatch.setattr(plans, "deepspeed_environment", missing)
    app = typer.Typer()
    app.command()(state_sharding.main)
    arguments = ["--networks", "loopback,never", "--json", str(tmp_path / "found.json")]
    result = CliRunner().invoke(app, [*arguments, "--doc", str(tmp_path / "page.md")])
    assert result.exit_code == code, result.output
    assert "DeepSpeed is missing: no wheel" in result.output
    assert "links of never are skipped" in result.output
    body = json.loads((tmp_path / "found.json").read_text())
    assert body["passed"] == (code == 0)
    assert len(body["rows"]) == 8
    assert body["rows"][0]["hidden"] == pytest.approx(0.75)
    assert "Llama of 8.4 million" in (tmp_path / "page.md").read_text()
