"""Texts that transformers' `Seq2SeqTrainer` generates as it evaluates: those of one process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

import merakc
from merakc.equality.ranks import run_ranks
from merakc.integrations.trainer import parallel
from merakc.machines.cluster import NOMINAL_CPU
from tests.battery.small_models import build
from tests.train.outside.test_generating import t5

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own
Tensors = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """Leaves nothing of accelerate's state to the ranks of the next test."""
    yield
    AcceleratorState._reset_state(True)


def pairs(count: int) -> list[Tensors]:
    """Of a text and the one that it is to become."""
    drawn = torch.Generator().manual_seed(count)
    return [
        {"input_ids": torch.randint(3, 64, (7,), generator=drawn),
         "labels": torch.randint(3, 64, (5,), generator=drawn)}
        for _ in range(count)
    ]  # fmt: skip


def told(given: Any) -> dict[str, float]:
    """Numbers that say which texts were generated."""
    found = torch.as_tensor(given.predictions)
    weights = torch.arange(1, found.numel() + 1).view(found.shape)
    return {"texts": float((found * weights).sum()), "width": float(found.shape[1])}


def trained(kind: Any, model: Any, folder: Path) -> tuple[list[float], list[list[int]]]:
    """What the trainer logs of its evaluations, and the texts of a test set."""
    arguments = Seq2SeqTrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=4, per_device_eval_batch_size=5,
        num_train_epochs=1, learning_rate=1e-2, eval_strategy="steps", eval_steps=2,
        predict_with_generate=True, generation_max_length=6, generation_num_beams=2,
        save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    trainer = kind(
        model=model, args=arguments, train_dataset=pairs(16), eval_dataset=pairs(8),
        compute_metrics=told,
    )  # fmt: skip
    trainer.train()
    kept = "eval_loss", "eval_texts", "eval_width"
    logged = [h[k] for h in trainer.state.log_history for k in kept if k in h]
    return logged, trainer.predict(pairs(7), max_new_tokens=4).predictions.tolist()


def on_ranks(layout: dict[str, Any], folder: Path) -> tuple[list[float], list[list[int]]]:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "LOCAL_WORLD_SIZE": "2"}  # as torchrun does
    batch = {k: torch.stack([p[k] for p in pairs(4)]) for k in ("input_ids", "labels")}
    model = merakc.auto_parallel(build(t5), batch, cluster=NOMINAL_CPU, **layout)
    return trained(parallel(Seq2SeqTrainer), model, folder)


@pytest.mark.parametrize("layout", [{"dp": 2, "state_shards": "zero-1"}, {"pp": 2}])
def test_texts_of_an_evaluation(layout: dict[str, Any], tmp_path: Path) -> None:
    logged, texts = trained(Seq2SeqTrainer, build(t5), tmp_path)
    AcceleratorState._reset_state(True)
    assert len(logged) == 6
    for own, found in run_ranks(2, on_ranks, layout, tmp_path):
        assert own == pytest.approx(logged, rel=1e-10)
        assert found == texts
