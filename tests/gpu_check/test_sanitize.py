"""What compute-sanitizer reports, and where it is not there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from merakc.gpu_check.sanitize import found

TOOL = """#!/bin/sh
echo "========= COMPUTE-SANITIZER"
echo "========= Invalid __global__ write of size 4 bytes"
exit {code}
"""


@pytest.mark.parametrize("code", [0, 7])
def test_a_report_is_a_line(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(TOOL.format(code=code))
    os.chmod(tool, 0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    lines = found()
    assert bool(lines) == bool(code)
    assert all("Invalid __global__ write" in line for line in lines)


def test_without_it_the_check_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(RuntimeError, match="CUDA toolkit"):
        found()
