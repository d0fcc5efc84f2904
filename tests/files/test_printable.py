"""What would steer a terminal is shown, everything else stays as it is."""

from __future__ import annotations

import pytest

from merakc.errors import MerakError, MerakWarning
from merakc.files.printable import count_of, printable


def test_names_of_many_and_of_one() -> None:
    assert count_of(1, "micro-batch") == "1 micro-batch"
    assert (count_of(2, "batch"), count_of(2048, "rank")) == ("2 batches", "2,048 ranks")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("layers.*.weight\tµs, ±3 %\n→ 中", "layers.*.weight\tµs, ±3 %\n→ 中"),
        ("\x1b]0;title\x07", "\\u001b]0;title\\u0007"),
        ("a\rb\x9b31m\x7f", "a\\rb\\u009b31m\\u007f"),
        ("\u202egnp.exe\u2028", "\\u202egnp.exe\\u2028"),
        ("\ud800", "\\ud800"),
    ],
)
def test_control_characters_are_shown(text: str, shown: str) -> None:
    assert printable(text) == shown
    assert printable(shown) == shown
    printable(text).encode()


@pytest.mark.parametrize("kind", [MerakError, MerakWarning])
def test_messages_quote_files_harmlessly(kind: type[Exception]) -> None:
    assert str(kind("plan.json: splits.\x1b[2J is bad")) == "plan.json: splits.\\u001b[2J is bad"
