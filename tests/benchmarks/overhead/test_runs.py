from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.overhead import runs as overhead_runs
from benchmarks.overhead.runs import (
    Duel,
    First,
    Rival,
    batch_of,
    crowd,
    difference,
    duel,
    first,
    median_first,
    quiet,
)
from benchmarks.overlap_steps import Size

TINY = Size(layers=2, hidden=64, sequence=16, samples=4)


@pytest.mark.parametrize(("micro_batches", "rival"), [(2, "eager"), (1, "unwatched")])
def test_both_sides_take_the_same_step(
    micro_batches: int, rival: Rival, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overhead_runs, "repeats_for", lambda step: 1)
    found = duel("gpt2", TINY, micro_batches=micro_batches, rival=rival, rounds=2)
    assert len(found.theirs_s) == len(found.ours_s) == 2
    assert min(*found.theirs_s, *found.ours_s) > 0
    assert found.error < 1e-5


def test_ratios_are_taken_round_by_round() -> None:
    found = Duel("gpt2", TINY, 1, (1.0, 2.0, 4.0), (0.5, 1.8, 2.0), 0.0, 0.0)
    assert found.ratios == [0.5, 0.9, 0.5]
    assert found.ratio == 0.5


def test_wrong_gradients_are_seen() -> None:
    wanted = {"a": torch.tensor([1.0, -4.0]), "b": torch.tensor([0.5])}
    assert difference(wanted, wanted) == 0
    assert difference({**wanted, "b": torch.tensor([0.7])}, wanted) == pytest.approx(0.05)
    with pytest.raises(AssertionError, match="b"):
        difference({"a": wanted["a"]}, wanted)


def test_the_quietest_try_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others are busy in all tries but the third."""
    busy = iter([0.0, 5.0, 10.0, 15.0, 20.0, 20.0])
    monkeypatch.setattr(overhead_runs, "cpu_busy_s", lambda: next(busy))
    steps: list[int] = []
    _, others = quiet(lambda: steps.append(0), 2)
    assert others == 0.0
    assert len(steps) == 6


def test_the_cpu_time_of_ranks_is_added_up() -> None:
    found = crowd(TINY, 2, micro_batches=2, steps=1)
    assert found.ranks == 2
    assert found.cpu_s > 0
    # Each rank has two forwards and two backwards, and receives as often as the other sends.
    assert found.actions >= 2 * 4 + 2 * 2


def test_the_first_step_of_a_fresh_process(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    unknown = first("gpt2", TINY, plan)
    assert plan.exists()
    known = first("gpt2", TINY, plan)
    for found in (unknown, known):
        assert found.cached
        assert min(found.import_s, found.build_s, found.plan_s, found.step_s) > 0
    with pytest.raises(RuntimeError, match=r"benchmarks\.overhead\.first"):
        first("gpt2", Size(1, 64, 16, 0), None)


def test_the_median_of_first_steps() -> None:
    found = [First(False, 0, 0, plan_s, 1.0) for plan_s in (3.0, 1.0, 2.0)]
    assert median_first(found).latency_s == 3.0


def test_batches_are_the_same_everywhere() -> None:
    batch = batch_of(TINY)
    assert batch["input_ids"].shape == (4, 16)
    assert torch.equal(batch["input_ids"], batch_of(TINY)["input_ids"])
