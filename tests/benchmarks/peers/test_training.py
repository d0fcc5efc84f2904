from __future__ import annotations

import pytest
import torch

from benchmarks.peers.training import Training, largest_error, train_alone

TINY = Training(ranks=2, samples=2, sequence=8, hidden=16, layers=1, vocabulary=32)


def test_ranks_share_out_the_batch() -> None:
    whole = TINY.batch(3)["input_ids"]
    parts = [TINY.batch(3, rank)["input_ids"] for rank in range(2)]
    assert torch.equal(torch.cat(parts), whole)
    assert not torch.equal(TINY.batch(4)["input_ids"], whole)


def test_the_error_is_relative_to_the_way_that_weights_went() -> None:
    before, after = train_alone(TINY, 2)
    assert largest_error(after, before, after) == 0.0
    assert largest_error(before, before, after) == pytest.approx(1.0)
    half = {name: (after[name] + before[name]) / 2 for name in after}
    # One parameter that is off is not lost among those that are right.
    assert largest_error(after | {"lm_head.weight": half["lm_head.weight"]}, before, after) == (
        pytest.approx(0.5, rel=1e-3)
    )


def test_other_weights_are_refused() -> None:
    before, after = train_alone(TINY, 1)
    with pytest.raises(ValueError, match=r"names: \['lm_head.weight'\]"):
        largest_error({n: p for n, p in after.items() if n != "lm_head.weight"}, before, after)
    with pytest.raises(ValueError, match="has shape"):
        largest_error(after | {"lm_head.weight": torch.zeros(3)}, before, after)
