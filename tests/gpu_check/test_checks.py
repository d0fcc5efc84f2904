"""The list of checks, and how one ends."""

from __future__ import annotations

from typing import Any

import pytest

from merakc.gpu_check import checks
from merakc.gpu_check.checks import Check, Found, all_checks, run


def test_a_machine_without_gpus_is_asked_what_a_cpu_can_tell() -> None:
    on_cpu, on_gpu = [*all_checks("cpu", 0)], [*all_checks("cuda", 1)]
    assert {c.name for c in on_gpu} - {c.name for c in on_cpu} >= {"compute-sanitizer"}
    assert all("one GPU" not in c.name for c in on_cpu)
    assert sum("one GPU" in c.name for c in on_gpu) == len(checks.LAYOUTS)
    assert all("one GPU" not in c.name for c in all_checks("cuda", 4))
    assert [c.room for c in on_gpu][-len(checks.speed.KINDS) :] == ["speed"] * 4
    assert all(c.runs in checks.RUN for c in on_gpu)
    assert len({c.name for c in on_gpu}) == len(on_gpu)


def test_an_equality_is_run() -> None:
    found = run(Check("equality", "bert", "equality", {"model": "bert", "device": "cpu"}))
    assert found.ok, found
    assert found.text.endswith("1e-10 is allowed")
    assert found.figures.keys() == {"loss", "gradient", "weight"}


def _ended(monkeypatch: pytest.MonkeyPatch, found: dict[str, float]) -> Found:
    monkeypatch.setattr(checks, "compare", lambda *_, **__: found)
    return run(Check("equality", "bert", "equality", {"model": "bert", "device": "cpu"}))


def test_too_large_an_error_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _ended(monkeypatch, {"loss": 1e-11}).ok
    found = _ended(monkeypatch, {"loss": 1e-11, "gradient": 1e-9})
    assert not found.ok
    assert found.text == "1.0e-09 of gradient, 1e-10 is allowed"


def test_an_exception_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("first line\nthe last line\n")

    monkeypatch.setattr(checks, "compare", fails)
    found = run(Check("equality", "bert", "equality", {"model": "bert", "device": "cpu"}))
    assert not found.ok
    assert found.text == "RuntimeError: the last line"
    assert "first line" in found.figures["traceback"]


def test_lines_of_faults_are_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "check_scores", lambda _: ["one", "two"])
    found = run(Check("kernels", "losses", "scores", {"device": "cpu"}))
    assert (found.ok, found.text, found.figures) == (False, "one", {"wrong": ["one", "two"]})
