"""Damage: of every kind, and the same for a seed."""

from __future__ import annotations

import json
import random

from benchmarks.fuzz.mutations import damaged_bytes, damaged_json, damaged_lines

TEXT = json.dumps({"a": [1, 2, {"b": "word"}], "c": 1.5, "d": {"e": None}})


def test_a_seed_gives_the_same_damage() -> None:
    for damage in (damaged_bytes, damaged_lines):
        assert damage("a = 1\nb = 2\n", random.Random(3)) == damage(
            "a = 1\nb = 2\n", random.Random(3)
        )


def test_values_are_changed_and_signed() -> None:
    draw = random.Random(0)
    found = {damaged_json(TEXT, draw, lambda body: {"signed": body}) for _ in range(200)}
    assert len(found) > 100
    assert all(text.startswith(b'{"signed": ') for text in found)
    assert any(b'"a": 0, "a": ' in text or b'"c": null, "c": ' in text for text in found)


def test_bytes_are_lost_put_in_and_flipped() -> None:
    draw = random.Random(0)
    sizes = {len(damaged_bytes(TEXT, draw)) - len(TEXT) for _ in range(100)}
    assert min(sizes) < 0 < max(sizes)
    assert 0 in sizes
