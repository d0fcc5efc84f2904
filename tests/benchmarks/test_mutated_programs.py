"""Mutated Programs, as many as take a second."""

from __future__ import annotations

import random

from benchmarks.mutated_programs import ESCAPED, HARMLESS, REFUSED, of_collectives, of_orders


def test_none_of_a_few_escapes() -> None:
    draw = random.Random(0)
    found = [of_orders(draw) for _ in range(300)]
    found += [of_collectives(draw, alike=alike) for alike in (False, True) for _ in range(20)]
    assert set(found) == {REFUSED, HARMLESS}
    assert ESCAPED not in found
