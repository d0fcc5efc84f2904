"""Mixtures in loops are what their names say."""

from __future__ import annotations

import pytest
import torch

from benchmarks.expert_loops import CAPACITY, EXPERT_LOOPS, EXPERTS, LoopedExperts
from benchmarks.models import HIDDEN


def _rows(kind: str) -> list[int]:
    """How many rows each expert is given, of two texts of twelve words."""
    torch.manual_seed(0)
    mixture, found = LoopedExperts(kind), [0] * EXPERTS
    for k, expert in enumerate(mixture.experts):
        expert.register_forward_pre_hook(
            lambda _, args, k=k: found.__setitem__(k, len(args[0]))  # type: ignore[misc]
        )
    mixture(torch.randn(2, 12, HIDDEN))
    return found


def test_each_token_has_its_experts() -> None:
    assert sum(_rows("index_add")) == 2 * sum(_rows("masked_writes")) == 48
    assert min(_rows("index_add")) > 0


def test_the_last_of_uneven_experts_has_no_rows() -> None:
    for kind in ("uneven", "hit", "normed"):
        rows = _rows(kind)
        assert rows[-1] == 0
        assert rows[0] > 18


def test_a_capacity_drops_tokens() -> None:
    rows = _rows("capacity")
    assert max(rows) == 2 * CAPACITY
    assert sum(rows) < 24


@pytest.mark.parametrize("name", EXPERT_LOOPS)
def test_they_train(name: str) -> None:
    case = EXPERT_LOOPS[name]
    model = case.model()
    model(**case.batch(2))["loss"].backward()
    without = {n for n, p in model.named_parameters() if p.grad is None}
    last = {n for n, _ in model.named_parameters() if ".experts.3." in n}
    assert without == (last if name == "loop_hit" else set())
