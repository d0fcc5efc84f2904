from __future__ import annotations

import random

import torch

from benchmarks.faults.__main__ import cells
from benchmarks.faults.work import KINDS, LAYOUTS, Small, batch, pick_victim


def test_all_pairs_of_a_fault_and_a_layout_come_in_turn() -> None:
    names = [kind.name for kind in KINDS]
    every = cells(names, list(LAYOUTS), 200)
    pairs = {(kind.name, layout) for kind, layout in every}
    assert pairs == {(kind.name, layout) for kind in KINDS for layout in kind.layouts}
    assert len(every) == 200


def test_a_victim_is_a_rank_of_the_layout() -> None:
    pick = random.Random(0)
    alone = next(kind for kind in KINDS if "rank 0 alone" in kind.name)
    assert {pick_victim(KINDS[0], "tp2 x pp2", pick) for _ in range(50)} == {0, 1, 2, 3}
    assert {pick_victim(alone, "pp2", pick) for _ in range(9)} == {0}


def test_the_model_gives_logits_without_labels() -> None:
    model = Small()
    assert model(**batch())["loss"].isfinite()
    assert model(batch()["x"]).keys() == {"logits"}
    assert torch.equal(batch(6)["x"], batch(6)["x"])
