"""The questions of docs/budget.md are answered by the commands that it names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from merakc.cli.budget import VARIED
from merakc.planner.sources.source import PRESETS
from tests.as_users import told
from tests.test_commands_doc import EXAMPLE

PAGE = (Path(__file__).parent.parent / "docs" / "budget.md").read_text()
QUESTIONS = dict(re.findall(r"^\| (.*\?) \| `(merakc .*)` \|$", PAGE, re.MULTILINE))
COLUMNS = {"--price": "price", "--tokens": "days", "--mfu": "MFU", "--near": "tp"}


def _smaller(command: str) -> str:
    """On fewer devices."""
    command = re.sub(r"--ranks \d+:\d+", "--ranks 2:4", command)
    command = re.sub(r"--ranks \d+ ", "--ranks 4 ", command).replace("--tp 4", "--tp 2")
    return command.replace("--from 64 --to 256", "--from 2 --to 4")


def test_each_question_is_answered_by_a_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model with fewer layers than the page's."""
    small = {**PRESETS["llama-3-8b"], "num_hidden_layers": 2, "hidden_size": 512,
             "intermediate_size": 1024, "vocab_size": 4096}  # fmt: skip
    monkeypatch.setitem(PRESETS, "llama-3-8b", small)
    monkeypatch.setattr("merakc.planner.offers.DOUBLINGS", 1)
    assert len(QUESTIONS) >= 10
    plan, example = EXAMPLE.finditer(PAGE)
    assert "to pay" in told(tmp_path, _smaller(plan["command"]))
    assert example["command"] in QUESTIONS.values()
    for command in QUESTIONS.values():
        text = told(tmp_path, _smaller(command))
        for option, name in COLUMNS.items():
            assert name in text or option not in command or " show " in command
        if command == example["command"]:
            shown, printed = (next(line for line in found.splitlines() if "devices" in line)
                              for found in (example["shown"], text))  # fmt: skip
            same = {*VARIED}  # left out where it is the same in all rows
            assert [h for h in shown.split() if h not in same] == [
                h for h in printed.split() if h not in same
            ]
