"""Text from elsewhere for a terminal or a page: what would steer it is shown instead."""

from __future__ import annotations

import json


def printable(text: str) -> str:
    r"""The text, with what is no letter, sign, tab or line break written as JSON does: `\u001b`.

    Escape sequences, other control characters, those that change the direction of writing, and
    halves of surrogate pairs, which cannot be encoded.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else json.dumps(c)[1:-1] for c in text)


def count_of(number: int, name: str) -> str:
    """2, "rank" -> "2 ranks"; a batch has batches."""
    if number == 1:
        return f"1 {name}"
    return f"{number:,} {name}{'es' if name.endswith('ch') else 's'}"
