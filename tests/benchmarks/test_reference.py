"""The reference: the loss of the whole batch, rank 0's running statistics."""

from __future__ import annotations

import pytest
import torch

from benchmarks.models import MODELS
from benchmarks.reference import train_reference


@pytest.mark.parametrize("name", ["gpt2", "t5", "vit"])
def test_micro_batches_add_up_to_the_whole_batch(name: str) -> None:
    split, whole = (
        train_reference(MODELS[name], batch_size=8, micro_batches=m, steps=2, lift_casts=True)
        for m in (4, 1)
    )
    assert split.losses == pytest.approx(whole.losses, rel=1e-14)
    for key, value in whole.weights.items():
        assert (value - split.weights[key]).abs().max() < 1e-14, key
    for one, other in zip(split.gradients, whole.gradients, strict=True):
        assert one.keys() == other.keys()
        for key, value in other.items():
            assert (value - one[key]).abs().max() < 1e-13, key


def test_weights_move_and_batches_differ_from_step_to_step() -> None:
    case = MODELS["gpt2"]
    reference = train_reference(case, batch_size=4, micro_batches=2, steps=2)
    start = case.model(torch.float64).state_dict()
    assert all(not torch.equal(start[k], v) for k, v in reference.weights.items())
    first, second = (g["transformer.wte.weight"] for g in reference.gradients)
    assert not torch.equal(first, second)


def test_under_data_parallelism_only_the_first_rank_writes_buffers() -> None:
    case = MODELS["resnet"]
    both, first = (
        train_reference(case, batch_size=8, micro_batches=4, steps=1, dp=dp) for dp in (1, 2)
    )
    assert both.losses == first.losses
    assert both.buffers["stem.1.num_batches_tracked"] == 4
    assert first.buffers["stem.1.num_batches_tracked"] == 2
    mean = "stem.1.running_mean"
    assert not torch.equal(both.buffers[mean], first.buffers[mean])


def test_tied_weights_appear_under_every_name_and_their_gradient_once() -> None:
    reference = train_reference(MODELS["llama_tied"], batch_size=4, micro_batches=2, steps=1)
    assert "lm_head.weight" in reference.weights
    assert "lm_head.weight" not in reference.gradients[0]
