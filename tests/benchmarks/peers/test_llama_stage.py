from __future__ import annotations

import torch

from benchmarks.peers.llama_stage import (
    LlamaStage,
    cut,
    head_layers,
    next_word_loss,
    original_name,
)
from tests.benchmarks.peers.comparing import TINY


def test_stages_compute_what_the_model_does() -> None:
    model, batch = TINY.model(), TINY.batch(0)
    x = batch["input_ids"]
    for k in range(2):
        x = LlamaStage(model, range(k, k + 1), first=k == 0, last=k == 1)(x)
    found = model(**batch)
    torch.testing.assert_close(x, found.logits)
    torch.testing.assert_close(next_word_loss(x, batch["labels"]), found.loss)


def test_names_are_those_of_the_model() -> None:
    model = TINY.model()
    stage = LlamaStage(model, range(2), first=True, last=True)
    named = {original_name(f"module.{name}") for name, _ in stage.named_parameters()}
    assert named == {name for name, _ in model.named_parameters()}


def test_the_head_counts_as_layers() -> None:
    assert cut(8, 2, 0.0) == [range(4), range(4, 8)]
    assert cut(8, 2, 1.5) == [range(5), range(5, 8)]
    assert cut(8, 1, 1.5) == [range(8)]
    model = TINY.model()
    assert head_layers(model) == 32 * 16 / (4 * 16 * 16 + 3 * 16 * 42 + 2 * 16)
