from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.peers import environments
from benchmarks.peers.environments import (
    MissingPeerError,
    accelerate_environment,
    deepspeed_environment,
)


def test_installs_once_torch_before_deepspeed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    commands: list[tuple[str, ...]] = []

    def run(*command: str, variables: object = None) -> str:
        commands.append(command)
        if "venv" in command:
            Path(command[-1]).mkdir(parents=True)
        return "1.2.3\n"

    monkeypatch.setattr(environments, "_run", run)
    found = deepspeed_environment(tmp_path)
    assert found.version == "1.2.3"
    assert found.python.is_relative_to(tmp_path)
    assert found.variables["TORCH_EXTENSIONS_DIR"].startswith(str(tmp_path))
    installs = [c for c in commands if "install" in c]
    assert [("deepspeed" in c) for c in installs] == [False, True]
    assert all(any(word.startswith("torch==") for word in c) for c in installs)
    count = len(commands)
    assert deepspeed_environment(tmp_path) == found
    assert len(commands) == count


def test_says_why_a_peer_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(environments, "BUILD", "raise SystemExit('no compiler')")
    real = environments._run

    def run(*command: str, variables: dict[str, str] | None = None) -> str:
        if "-c" in command:
            return real("python", *command[1:], variables=variables)
        if "venv" in command:
            Path(command[-1]).mkdir(parents=True)
        return ""

    monkeypatch.setattr(environments, "_run", run)
    for _ in range(2):  # what is half installed is no peer
        with pytest.raises(MissingPeerError, match="no compiler"):
            deepspeed_environment(tmp_path)


def test_accelerate_is_installed_where_it_is_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[object] = []
    monkeypatch.setattr(environments, "_environment", lambda *given: asked.append(given))
    monkeypatch.setattr(environments.importlib.util, "find_spec", lambda name: object())
    assert accelerate_environment(tmp_path) is None
    assert not asked
    monkeypatch.setattr(environments.importlib.util, "find_spec", lambda name: None)
    accelerate_environment(tmp_path)
    assert asked == [(tmp_path, "accelerate", ("accelerate",))]
