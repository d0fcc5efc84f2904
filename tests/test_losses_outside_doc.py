"""The scripts of docs/losses-outside.md run on two ranks, and train as others do."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.as_users import losses, printed

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "losses-outside.md").read_text()
FUNCTION, LOOP, CALLS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_the_scripts_train_alike(tmp_path: Path) -> None:
    function, loop = (losses(printed(tmp_path, script, 2)) for script in (FUNCTION, LOOP))
    assert len(function) == 5
    assert loop == pytest.approx(function, abs=1e-5)


def test_several_calls_train_as_on_one_rank(tmp_path: Path) -> None:
    on_two = losses(printed(tmp_path, CALLS, 2))
    assert len(on_two) == 5
    alone = CALLS.replace("dp=2", "dp=1")
    assert on_two == pytest.approx(losses(printed(tmp_path, alone, 1)), abs=1e-5)
