from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from merakc.cli import bench
from merakc.cli.app import app
from merakc.errors import ConfigError


def test_passes_everything_on(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def run(command: list[str], **given: Any) -> SimpleNamespace:
        asked.append((command, given["env"]["PYTHONPATH"]))
        return SimpleNamespace(returncode=1)

    monkeypatch.setattr(subprocess, "run", run)
    result = CliRunner().invoke(app, ["bench", "--plans", "dp2", "--doc", "x.md", "--help"])
    assert result.exit_code == 1, result.output
    ((command, path),) = asked
    assert command[1:] == ["-m", "benchmarks.peers", "--plans", "dp2", "--doc", "x.md", "--help"]
    assert (Path(path.split(":")[0]) / "benchmarks" / "peers" / "__main__.py").is_file()


def test_an_installed_merakc_says_what_it_lacks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    module = tmp_path / "site-packages" / "merakc" / "commands" / "bench.py"
    with pytest.raises(ConfigError, match=r"site-packages does not hold it; clone"):
        bench.checkout(module)
    monkeypatch.setattr(bench, "__file__", str(module))
    result = CliRunner().invoke(app, ["bench"])
    assert result.exit_code == 2
    assert "ConfigError: merakc bench runs benchmarks.peers" in result.output.replace("\n", " ")
