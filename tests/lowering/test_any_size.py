"""Recordings and steps for new shapes of batch, made from what is known of others."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, T5Config, T5ForConditionalGeneration

from merakc.ir.batches import BatchLayout
from merakc.ir.graph import Node
from merakc.lowering.any_size import AnySizes
from merakc.lowering.recording import record_part
from merakc.passes.batches.recorded import BatchRecording
from tests.battery.small_models import WIDTH, WORDS, Tensors, Words, parallel, words

CPU = torch.device("cpu")
# Samples and lengths, in the order in which they come; micro-batches are of 2 to 4, and of 1.
SHAPES = ((8, 6), (12, 9), (8, 20), (12, 7), (4, 6))


class Asks(nn.Module):
    """Words, and more that goes by the sizes of its batch: what `asks` of them."""

    def __init__(self, asks: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(32, WIDTH)
        self.head, self.asks = nn.Linear(WIDTH, WORDS), asks

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The loss, times what is asked."""
        x = self.embedding(ids) + self.places(torch.arange(ids.shape[1]))
        logits = self.head(F.pad(x, (0, 0, 1, 0))[:, 1:])
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) * self.asks(ids)


def gpt2() -> nn.Module:
    sizes = {"vocab_size": WORDS, "n_embd": WIDTH, "n_layer": 2, "n_head": 2, "n_positions": 32}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def t5() -> nn.Module:
    sizes = {"vocab_size": WORDS, "d_model": WIDTH, "d_kv": 4, "d_ff": 16, "num_layers": 1}
    config = T5Config(**sizes, decoder_start_token_id=0)
    return T5ForConditionalGeneration(config)


def in_table(ids: torch.Tensor) -> float:
    return {"9": 0.5, "20": 0.25}.get(f"{ids.shape[1]}", 2.0)


def is_long(ids: torch.Tensor) -> float:
    return 0.5 if isinstance(ids.shape[1], int) and ids.shape[1] > 10 else 2.0


# By whether one recording does for several shapes.
MODELS: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "words with dropout": (lambda: Words(2, dropout=0.5), True),
    "gpt2": (gpt2, True),
    "t5": (t5, False),
    "a branch": (lambda: Asks(lambda ids: 0.5 if ids.shape[1] > 10 else 2.0), True),
    "a branch by type": (lambda: Asks(is_long), False),
    "a text": (lambda: Asks(in_table), False),
    "a root": (lambda: Asks(lambda ids: 1 / math.sqrt(ids.shape[1])), False),
    "a cap": (lambda: Asks(lambda ids: 1 / min(ids.shape[1], 8)), False),
}


def batch(kind: str, samples: int, length: int) -> Tensors:
    given = words(0, samples, length)
    if kind in ("gpt2", "t5"):
        return {"input_ids": given["ids"], "labels": given["labels"].clamp(min=0)}
    return given


def facts(made: BatchRecording) -> tuple[str, ...]:
    """All numbers of a recording, of its parts, and of the whole batch."""
    assert made.found is not None
    return str(made.graph), str(made.found.part), str(made.found.whole), repr(made.outputs)


@pytest.mark.parametrize("kind", MODELS)
def test_recordings_for_many_sizes_are_those_made_anew(kind: str) -> None:
    make, are_shared = MODELS[kind]
    model, known, shared = make(), AnySizes(), 0
    for samples, length in SHAPES:
        given, layout = batch(kind, samples, length), BatchLayout((samples,), 4)
        known.begin(None)
        before = known.anew
        found = record_part(model, (), given, layout, CPU, any_size=known)
        shared += known.anew == before
        anew = record_part(model, (), given, layout, CPU)
        assert facts(found) == facts(anew)
        assert found.graph == anew.graph
    assert (shared > 0) is are_shared


@pytest.mark.filterwarnings("ignore:merakc has compiled this model for 8")
def test_a_step_for_another_shape_keeps_no_stage_and_can_be_looked_into() -> None:
    model = parallel(lambda: Words(), words(0), micro_batches=2)
    for length in (5, 7, 8, 9, 11):
        model(**words(1, 8, length))["loss"].backward()
    gc.collect()
    before = sum(type(x) is Node for x in gc.get_objects())
    for length in range(12, 24):
        model(**words(1, 8, length))["loss"].backward()
    gc.collect()
    grown = sum(type(x) is Node for x in gc.get_objects()) - before
    assert grown < 12 * 8  # of what is known before the step, a few; the graphs have a hundred
    with torch.no_grad():
        model.embedding.weight.fill_(math.inf)
    assert "embedding" in str(model.find_nonfinite(**words(1, 8, 12)))
