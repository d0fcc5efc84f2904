"""A soak of some steps, and what it sees."""

from __future__ import annotations

import pytest

from benchmarks.soak import Course, Life, faults, growths, lives, table


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_run_that_is_killed_goes_on_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.soak.SAVES", 3)
    monkeypatch.setattr("benchmarks.soak.EVALUATES", 4)
    course = Course(steps=9, shapes=2, kill_every=5)
    (whole,) = lives(course, disturbed=False)
    found = list(lives(course, disturbed=True))
    assert len(found) == 2
    assert not faults(whole, found)
    assert table(whole, found).row_count == 3


def life(first: int, last: int, grows: int = 0, **other: float) -> Life:
    steps = range(first, last)
    losses = {step: float(step) for step in steps} | {int(k[1:]): v for k, v in other.items()}
    return Life(losses, {}, {step: 1000 + grows * step for step in steps})


def test_what_is_wrong_is_seen() -> None:
    whole = life(0, 100)
    assert not faults(whole, [life(0, 60), life(50, 100)])
    assert faults(whole, [life(0, 60, s7=1.5)])[0] == "life 0, losses of step 7: 1.5 for 7.0"
    assert "40 steps were never taken" in faults(whole, [life(0, 60)])
    assert "a life grows by" in faults(whole, [life(0, 100, grows=3)])[0]
    heavy = Life(whole.losses, {}, dict.fromkeys(range(100), 1100))
    assert faults(whole, [heavy]) == ["a life ends with 10.0% more memory than the undisturbed run"]
    assert growths([life(0, 10)]) == []
