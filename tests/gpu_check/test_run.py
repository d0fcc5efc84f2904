"""Checks in processes: results, crashes and checks without an end, one at a time where timed."""

from __future__ import annotations

import os
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest

from merakc.gpu_check import run as module
from merakc.gpu_check.checks import Check
from merakc.gpu_check.run import run_all

FAKE = """
import json, os, sys, time
asked, path = json.loads(sys.argv[1]), sys.argv[2]
how = asked["arguments"]["how"]
start = time.time()
if how == "crash":
    print("a CUDA error"); os._exit(134)
if how == "hang":
    time.sleep(100)
time.sleep(0.3)
open(path, "w").write(json.dumps({
    "room": asked["room"], "name": asked["name"], "ok": True, "text": "fine", "seconds": 0.3,
    "figures": {"start": start, "end": time.time()}}))
"""


@pytest.fixture
def _faked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "fake.py"
    script.write_text(FAKE)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nshift 2\nexec {sys.executable} {script} "$@"\n')
    os.chmod(python, 0o755)
    monkeypatch.setattr(module.sys, "executable", str(python))


@pytest.mark.usefixtures("_faked")
def test_how_checks_end() -> None:
    asked = [
        Check("equality", "well", "equality", {"how": "well"}),
        Check("equality", "crash", "equality", {"how": "crash"}),
        Check("equality", "hang", "equality", {"how": "hang"}, limit_s=1.0),
    ]
    begin_s = time.monotonic()
    found = {f.name: f for f in run_all(asked, at_once=3)}
    assert time.monotonic() - begin_s < 30
    assert found["well"].ok
    assert (found["crash"].ok, found["crash"].text) == (False, "exit code 134")
    assert found["crash"].figures["log"].strip() == "a CUDA error"
    assert found["hang"].text.startswith("no end after 1 s")


@pytest.mark.usefixtures("_faked")
def test_what_is_timed_runs_alone() -> None:
    rooms = ("speed", "equality", "speed")
    asked = [Check(room, f"{k}", "speed", {"how": "well"}) for k, room in enumerate(rooms)]  # type: ignore[arg-type]
    found = [*run_all(asked, at_once=3)]
    assert [f.room for f in found] == ["equality", "speed", "speed"]
    for before, after in pairwise(found):
        assert after.figures["start"] >= before.figures["end"]
