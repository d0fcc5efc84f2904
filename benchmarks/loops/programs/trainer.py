"""transformers' Trainer, of a whole model or of adapters of peft."""

from __future__ import annotations

from typing import Any

import torch
from transformers import TrainingArguments

import merakc
from benchmarks.loops.job import ACCUMULATED, BATCH, DECAY, MAX_NORM, RATE, WARM_UP, Job, Until
from merakc.integrations.trainer import Trainer  # merakc: from transformers import Trainer

TOLD = ("step", "loss", "grad_norm", "eval_loss", "eval_accuracy")


def metrics(given: Any) -> dict[str, float]:
    """The share of labels that are guessed."""
    known = given.label_ids[:, 1:] != -100
    guessed = given.predictions[:, :-1].argmax(-1) == given.label_ids[:, 1:]
    return {"accuracy": float(guessed[known].mean())}


def run(job: Job) -> torch.nn.Module:
    """Trains from `job.first` to `job.last`."""
    model = job.model()
    model = merakc.auto_parallel(model, job.example, **job.layout)  # merakc
    arguments = TrainingArguments(
        output_dir=str(job.checkpoint.parent), per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=BATCH, gradient_accumulation_steps=ACCUMULATED,
        max_steps=job.steps, learning_rate=RATE, warmup_steps=WARM_UP, max_grad_norm=MAX_NORM,
        lr_scheduler_type="constant_with_warmup", weight_decay=DECAY, logging_steps=1,
        eval_strategy="no", save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
        train_sampling_strategy="sequential",
    )  # fmt: skip
    trainer = Trainer(
        model=model, args=arguments, train_dataset=job.texts, eval_dataset=job.evaluated,
        compute_metrics=metrics, callbacks=[Until(job)],
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=str(job.checkpoint) if job.first else None)
    for entry in trainer.state.log_history:
        if entry["step"] > job.first and not entry.keys() & {"train_runtime"}:
            job.tell(**{k: entry[k] for k in TOLD if k in entry})
    return model
