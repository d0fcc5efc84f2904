from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from benchmarks.peers.training import (
    Training,
    first_gradients,
    gathered,
    largest_error,
    split,
    train_alone,
)
from benchmarks.ranks import run_ranks

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


def test_gradients_follow_from_the_first_step() -> None:
    model = TINY.model()
    model(**TINY.batch(0)).loss.backward()
    before, after = train_alone(TINY, 1)
    found = first_gradients(before, after)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(found[name].float(), parameter.grad, rtol=1e-3, atol=1e-5)


def test_ranks_of_a_copy_lie_side_by_side() -> None:
    training = replace(TINY, ranks=8, tp=2, pp=2, micro_batches=2)
    assert training.dp == 2
    places = [(training.dp_rank(r), training.pp_rank(r), training.tp_rank(r)) for r in range(8)]
    assert places == [(d, p, t) for d in range(2) for p in range(2) for t in range(2)]
    assert training.alone() == replace(TINY, ranks=1, samples=4, micro_batches=4)
    assert replace(training, micro_batches=1).alone().micro_batches == 1
    assert torch.equal(training.alone().batch(1)["labels"], training.batch(1)["labels"])
    parts = split(training.batch(1, 0), 2)
    whole = torch.cat([part["input_ids"] for part in parts])
    assert torch.equal(whole, training.batch(1, 0)["input_ids"])


def _gathered() -> dict[str, torch.Tensor]:
    rank = dist.get_rank()
    shared = {"shared": torch.full((1,), float(rank))}
    return gathered(shared | {f"own {rank}": torch.ones(1)}, TINY, rank)


def test_the_first_rank_of_a_weight_counts() -> None:
    first, second = run_ranks(2, _gathered)
    assert set(first) == {"shared", "own 0", "own 1"}
    assert first["shared"].item() == 0.0
    assert second == {}
