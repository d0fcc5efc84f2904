"""The reference: the loss of the whole batch, rank 0's running statistics."""

from __future__ import annotations

import pytest
import torch

from benchmarks.models import MODELS
from benchmarks.reference import split_batch, step_batch, train_reference


def test_the_loss_is_that_of_the_whole_batch() -> None:
    case = MODELS["gpt2"]
    loss = case.model(torch.float64)(**step_batch(case, 8, torch.float64, 0))["loss"]
    for micro_batches in (1, 4):
        reference = train_reference(case, batch_size=8, micro_batches=micro_batches, steps=1)
        assert reference.losses == (loss.item(),)


def test_batch_norms_see_each_micro_batch_by_itself() -> None:
    case = MODELS["resnet"]
    model, batch = case.model(torch.float64), step_batch(case, 8, torch.float64, 0)
    each = [model(**part)["loss"].item() for part in split_batch(batch, 4)]
    reference = train_reference(case, batch_size=8, micro_batches=4, steps=1)
    assert reference.losses == pytest.approx([sum(each) / 4], rel=1e-13)
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(reference.buffers[name], buffer, msg=name)
    whole = train_reference(case, batch_size=8, micro_batches=1, steps=1)
    assert whole.losses != pytest.approx(reference.losses, rel=1e-3)


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
