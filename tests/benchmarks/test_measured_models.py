"""The small models of `benchmarks.measured_cells` take their batches."""

from __future__ import annotations

import pytest
import torch

from benchmarks.measured_models import MODELS, make_batch


@pytest.mark.parametrize("name", MODELS)
def test_a_model_gives_a_loss_of_its_batch(name: str) -> None:
    torch.manual_seed(0)
    loss = MODELS[name]()(**make_batch(name, 2)).loss
    assert loss.shape == ()
    assert loss.isfinite()
