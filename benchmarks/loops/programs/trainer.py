"""transformers' Trainer, of a whole model or of adapters of peft."""

from __future__ import annotations

from typing import Any

import torch
from transformers import TrainingArguments

import merakc
from benchmarks.loops.job import Job, Until
from merakc.integrations.trainer import Trainer  # merakc: from transformers import Trainer


def metrics(given: Any) -> dict[str, float]:
    """The share of labels that are guessed."""
    known = given.label_ids[:, 1:] != -100
    guessed = given.predictions[:, :-1].argmax(-1) == given.label_ids[:, 1:]
    return {"accuracy": float(guessed[known].mean())}


def run(job: Job) -> torch.nn.Module:
    """Trains from `job.first` to `job.last`."""
    model = job.model()
    model = merakc.auto_parallel(model, job.example, **job.layout)  # merakc
    arguments = TrainingArguments(**job.arguments)
    trainer = Trainer(
        model=model, args=arguments, train_dataset=job.texts, eval_dataset=job.evaluated,
        compute_metrics=metrics, callbacks=[Until(job)],
    )  # fmt: skip
    job.train(trainer)
    return model
