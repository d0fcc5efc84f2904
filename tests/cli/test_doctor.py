"""`merakc doctor`, as a shell sees it."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from merakc.cli import doctor as module
from merakc.cli.app import app
from merakc.cli.health import Check

FINE = Check("torch", "ok", "2.11.0")
SLOW = Check("OMP_NUM_THREADS", "warn", "is not set", "export it")
TORN = Check("gloo", "fail", "is not there", "install [another] torch")


def _asked(monkeypatch: pytest.MonkeyPatch, checks: list[Check], *options: str) -> tuple[int, str]:
    monkeypatch.setattr(module, "all_checks", lambda: iter(checks))
    found = CliRunner().invoke(app, ["doctor", *options])
    return found.exit_code, found.stdout


def test_warnings_are_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    code, printed = _asked(monkeypatch, [FINE, SLOW])
    assert code == 0
    assert "1 ok, 1 warn, 0 fail" in printed
    assert "→ export it" in printed


def test_a_failure_is_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    code, printed = _asked(monkeypatch, [FINE, TORN])
    assert code == 1
    assert "→ install [another] torch" in printed
    code, printed = _asked(monkeypatch, [TORN], "--json")
    assert code == 1
    assert json.loads(printed) == [
        {"name": "gloo", "status": "fail", "found": "is not there",
         "remedy": "install [another] torch"}
    ]  # fmt: skip
