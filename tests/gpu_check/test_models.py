"""The models that are checked: their batches fit, and each is built alike at every call."""

from __future__ import annotations

import pytest
import torch

from merakc.gpu_check.models import MODELS, large_llama


@pytest.mark.parametrize("name", MODELS)
def test_a_model_takes_its_batch(name: str) -> None:
    one, other = (MODELS[name].build() for _ in range(2))
    for first, second in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(first, second)
    batch = MODELS[name].batch(3)
    assert ("attention_mask" in batch) == MODELS[name].padded
    assert one(**batch).loss.isfinite()


def test_the_large_one_has_the_size_that_is_told() -> None:
    with torch.device("meta"):
        model, words = large_llama(16)
    assert words == 128256
    assert sum(p.numel() for p in model.parameters()) == 1_235_814_400
