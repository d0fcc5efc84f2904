"""Random loss graphs in micro-batches: each trains as one process does, or is refused."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings

from benchmarks.loss_cells import Verdict
from benchmarks.random_losses import Tree, judge, trees

EXAMPLES = 30


# Shrinking takes minutes; the failing tree is printed, and `benchmarks.random_losses` finds short
# ones. Trees that say nothing (no gradient, ties) are many among the simple ones.
@pytest.mark.filterwarnings("ignore")
@settings(
    max_examples=EXAMPLES,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
@given(trees())
def test_a_random_loss_is_equal_or_refused(tree: Tree) -> None:
    found = judge(tree)
    assume(found is not None)
    assert found is not None
    verdict, reason = found
    assert verdict in (Verdict.EQUAL, Verdict.REFUSED), f"{tree}: {reason}"
