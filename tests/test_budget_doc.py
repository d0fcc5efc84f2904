"""The questions of docs/budget.md are answered by the commands that it names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from merakc.planner.sources import PRESETS
from tests.as_users import told
from tests.test_commands_doc import EXAMPLE

PAGE = (Path(__file__).parent.parent / "docs" / "budget.md").read_text()
QUESTIONS = dict(re.findall(r"^\| (.*\?) \| `(merakc .*)` \|$", PAGE, re.MULTILINE))
COLUMNS = {"--price": "price", "--tokens": "days", "--mfu": "MFU", "--near": "tp"}


def test_each_question_is_answered_by_a_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model with fewer layers than the page's."""
    small = {**PRESETS["llama-3-8b"], "num_hidden_layers": 2, "hidden_size": 512,
             "intermediate_size": 1024, "vocab_size": 4096}  # fmt: skip
    monkeypatch.setitem(PRESETS, "llama-3-8b", small)
    assert len(QUESTIONS) >= 10
    plan, example = EXAMPLE.finditer(PAGE)
    assert "to pay" in told(tmp_path, plan["command"])
    assert example["command"] in QUESTIONS.values()
    for command in QUESTIONS.values():
        text = told(tmp_path, re.sub(r"--ranks \d+:\d+", "--ranks 16:32", command))
        for option, name in COLUMNS.items():
            assert name in text or option not in command or " show " in command
        if command == example["command"]:
            heads = [next(line for line in shown.splitlines() if "devices" in line).split()
                     for shown in (example["shown"], text)]  # fmt: skip
            assert heads[0] == heads[1]
