"""Commands say nothing of what they are doing: how long that takes differs from run to run."""

from __future__ import annotations

import pytest

from merakc.report.terminal import QUIET


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """For every test of the room."""
    monkeypatch.setenv(QUIET, "1")
