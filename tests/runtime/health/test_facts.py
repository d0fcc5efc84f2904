from __future__ import annotations

from merakc.errors import MismatchError, StuckError
from merakc.runtime.health.facts import ALL, Expected, Fault, State, Status


def misses(expected: Expected, facts: list[str]) -> int:
    return sum(not expected.comes(fact) for fact in facts)


def test_what_repeats_is_expected_after_a_while() -> None:
    expected = Expected()
    assert misses(expected, ["train", "clip"] * 8) > 0
    assert misses(expected, ["train", "clip"] * 50) == 0


def test_accumulation_and_an_evaluation_now_and_then_are_learned() -> None:
    expected = Expected()
    epoch = ["train", "train", "train", "train", "clip"] * 10 + ["eval"] * 3
    misses(expected, epoch * 2)
    assert misses(expected, epoch * 5) <= 5 * 2  # where one begins, and where that was last so


def test_what_deviates_is_not_expected() -> None:
    expected = Expected()
    misses(expected, ["train"] * 20)
    assert misses(expected, ["eval"]) == 1


def test_what_is_remembered_is_bounded() -> None:
    expected = Expected()
    misses(expected, [str(k) for k in range(10_000)])
    assert len(expected.after) <= 4096


def test_equal_pasts_expect_equally() -> None:
    first, second = Expected(), Expected()
    facts = [str(k * k % 7) for k in range(9000)]
    assert [first.comes(f) for f in facts] == [second.comes(f) for f in facts]


def test_a_status_in_words() -> None:
    assert Status().words() == "before its first call"
    here = Status(3, "model(...)", {ALL: "x"}, State.IN, doing="action 2 of 5, '0F1'")
    assert here.words() == "in call 3, model(...), at action 2 of 5, '0F1'"
    assert Status(3, "model(...)").words() == "outside any call, after call 3, model(...)"


def test_a_fault_becomes_the_error_of_each_rank() -> None:
    here = Status(3, "model(...)", {}, State.IN)
    lost = Fault((1,), "rank 1 was lost").error(0, here, 2.0)
    assert isinstance(lost, StuckError)
    assert "rank 0 was in call 3" in str(lost)
    assert "timeout_s=2" in str(lost)
    other = Fault((1,), "the ranks went different ways", mismatch=True).error(0, here, 2.0)
    assert isinstance(other, MismatchError)
    assert Fault.read(Fault((1, 2), "text", mismatch=True).told()) == Fault((1, 2), "text", True)
