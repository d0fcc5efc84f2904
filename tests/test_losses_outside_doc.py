"""Both scripts of docs/losses-outside.md run on two ranks, and train alike."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.as_users import losses, printed

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "losses-outside.md").read_text()
FUNCTION, LOOP = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_the_scripts_train_alike(tmp_path: Path) -> None:
    function, loop = (losses(printed(tmp_path, script, 2)) for script in (FUNCTION, LOOP))
    assert len(function) == 5
    assert loop == pytest.approx(function, abs=1e-5)
