"""The example in docs/report.md is what the commands print.

After a change that is meant: `python -m tests.test_report_doc` writes the page again.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

import pytest

from tests.as_users import COLUMNS, told

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "report.md"
OUTPUT = re.compile(r"(?<=```text\n).*?(?=```)", re.DOTALL)
(MODEL,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
(BLOCK,) = re.findall(r"```bash\n(.*?)```", PAGE.read_text(), re.DOTALL)
HASH = re.compile(r"[0-9a-f]{12}")  # changes with whatever a plan can say


def printed(folder: Path) -> str:
    """What the last of the commands prints, in a folder with the model."""
    (folder / "model.py").write_text(MODEL)
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(sys.modules, "model", raising=False)
        return [told(folder, line) for line in BLOCK.splitlines()][-1]


def test_the_example_is_what_is_printed(tmp_path: Path) -> None:
    (shown,) = OUTPUT.findall(PAGE.read_text())
    assert HASH.sub("", shown) == HASH.sub("", printed(tmp_path))
    assert f"{COLUMNS} columns" in PAGE.read_text()


def test_the_example_tells_the_lines_of_the_model() -> None:
    (shown,) = OUTPUT.findall(PAGE.read_text())
    lines = MODEL.splitlines()
    (table,) = re.findall(r"^model\.py\n.*?\n\n\S", shown, re.MULTILINE | re.DOTALL)
    told = re.findall(r"^ +(\d+) +[\d.]+% +(\S.*?) {2,}", table, re.MULTILINE)
    assert len(told) >= 7
    for number, text in told:
        assert lines[int(number) - 1].strip().startswith(text)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        text = printed(Path(place))
    PAGE.write_text(OUTPUT.sub(lambda _: text, PAGE.read_text()))
