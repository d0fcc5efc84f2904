"""Labels are the text form of actions, read back."""

from __future__ import annotations

import pytest

from merakc.ir.program import Action, ActionKind
from merakc.report.charts.labels import ComputeLabel, MessageLabel, parse_label


@pytest.mark.parametrize("letter", ["F", "B", "I", "W"])
def test_compute(letter: str) -> None:
    label = str(Action(ActionKind(letter), 12, 34))
    assert parse_label(label) == ComputeLabel(12, letter, 34)


def test_both_ends_of_a_message_have_the_same_content() -> None:
    send = Action(ActionKind.SEND, 2, 5, "add_7:1", peer=3, is_grad=False)
    receive = Action(ActionKind.RECV, 3, 5, "add_7:1", peer=2, is_grad=False)
    assert parse_label(str(send)) == MessageLabel(True, "F5 add_7:1", 3)
    assert parse_label(str(receive)) == MessageLabel(False, "F5 add_7:1", 2)


def test_gradient_differs_from_its_value() -> None:
    gradient = Action(ActionKind.SEND, 2, 5, "add_7", peer=1, is_grad=True)
    assert parse_label(str(gradient)) == MessageLabel(True, "B5 add_7", 1)


def test_anything_else_has_no_parts() -> None:
    assert parse_label(str(Action(ActionKind.REDUCE, 1))) is None
    assert parse_label("optimizer") is None
