"""The command: its exit status, files, and what is told of what is missing."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from click.testing import Result
from typer.testing import CliRunner

from benchmarks.peers import networks, plans
from benchmarks.peers.environments import MissingPeerError
from benchmarks.peers.networks import Network, NetworkError
from benchmarks.peers.rounds import Course, Entry, Row

main = importlib.import_module("benchmarks.peers.__main__")


def run(*arguments: str) -> Result:
    app = typer.Typer()
    app.command()(main.main)
    return CliRunner().invoke(app, arguments)


@pytest.mark.parametrize(("peer_s", "code"), [(1.2, 0), (0.8, 1)])
def test_exit_status_and_files(
    peer_s: float, code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def measure(
        self: Course, network: Network, found: list[Entry], rounds: int, steps: int, **_: Any
    ) -> list[Row]:
        made = []
        for entry in found:
            step_s = 1.0 if entry.peer == "merakc_plan" else peer_s
            row = Row(network.name, entry, steps_s=(step_s,) * rounds, error=0.0)
            made.append(replace(row, gradient_error=0.0, peaks_bytes=(2**20,)))
        return made

    def missing(cache: Path) -> None:
        raise MissingPeerError("no wheel")

    def no_network(ranks: int, rate: str) -> None:
        raise NetworkError("no root")

    monkeypatch.setattr(Course, "measure", measure)
    monkeypatch.setattr(plans, "deepspeed_environment", missing)
    monkeypatch.setattr(plans, "accelerate_environment", lambda cache: None)
    monkeypatch.setattr(networks, "slow_network", no_network)
    arguments = ["--plans", "dp2,pp2", "--json", str(tmp_path / "found.json")]
    arguments += ["--doc", str(tmp_path / "page.md"), "--plot", str(tmp_path / "x.svg")]
    result = run(*arguments)
    assert result.exit_code == code, result.output
    assert "DeepSpeed: no wheel" in result.output
    assert "links of 1gbit are skipped: no root" in result.output
    body = json.loads((tmp_path / "found.json").read_text())
    assert body["passed"] == (code == 0)
    assert body["best_peer_to_merakc"]["pp2, loopback"] == peer_s
    labels = [row["entry"]["label"] for row in body["results"][0]["rows"]]
    assert "Trainer" in labels
    assert not [label for label in labels if "DeepSpeed" in label]
    page = (tmp_path / "page.md").read_text()
    assert "Llama of 8.4 million" in page
    assert "- Megatron-Core: asks for CUDA" in page
    assert (tmp_path / "x.svg").exists()


def test_what_was_stopped_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With the table that it stopped at; those before are taken from its file."""
    measured: list[tuple[int, int]] = []

    def measure(
        self: Course, network: Network, found: list[Entry], rounds: int, steps: int, **_: Any
    ) -> list[Row]:
        training = self.training
        if (training.dp, training.pp) == (1, 2) and len(measured) == 1:
            raise KeyboardInterrupt
        measured.append((training.dp, training.pp))
        own = Row(network.name, found[0], steps_s=(1.0,) * rounds, error=0.0, gradient_error=0.0)
        return [replace(own, entry=entry) for entry in found]

    monkeypatch.setattr(Course, "measure", measure)
    path = tmp_path / "found.json"
    options = ["--plans", "dp2,pp2", "--peers", "merakc_plan", "--networks", "loopback"]
    options += ["--json", str(path)]
    assert "there is none" in run(*options, "--resume").output
    assert run(*options).exit_code != 0
    assert len(json.loads(path.read_text())["results"]) == 1
    assert "another comparison" in run(*options, "--resume", "--hidden", "64").output
    assert "another comparison" in run(*options, "--resume", "--rounds", "3").output
    assert "another comparison" in run(*options[:2], *options[4:], "--resume").output
    measured.append((0, 0))
    result = run(*options, "--resume")
    assert result.exit_code == 0, result.output
    assert measured == [(2, 1), (0, 0), (1, 2)]
    body = json.loads(path.read_text())
    assert [found["plan"] for found in body["results"]] == ["dp2", "pp2"]


@pytest.mark.parametrize(("option", "given"), [("--plans", "dp2,foo"), ("--peers", "foo")])
def test_a_name_that_is_none_is_refused_with_those_that_are(option: str, given: str) -> None:
    result = run(option, given)
    assert result.exit_code == 2
    said = " ".join(result.output.replace("│", " ").split())
    assert f"Invalid value for {option}: foo not known; choose of" in said
