"""TRL's training by preferences, with a model of reference."""

from __future__ import annotations

import torch
from datasets import Dataset
from trl import DPOConfig

import merakc
from benchmarks.loops.job import (
    ACCUMULATED,
    BATCH,
    DECAY,
    MAX_NORM,
    RATE,
    UNTOLD,
    WARM_UP,
    Job,
    Until,
    spoken,
    texts,
    tokenizer,
)
from merakc.integrations.trl import DPOTrainer  # merakc: from trl import DPOTrainer


def run(job: Job) -> torch.nn.Module:
    """Trains from `job.first` to `job.last`."""
    model, reference = job.model(), job.model()
    model = merakc.auto_parallel(model, job.example, **job.layout)  # merakc
    for parameter in reference.parameters():
        parameter.data.mul_(1.5)
    data, evaluated = (
        Dataset.from_list(
            [
                {"prompt": spoken(t)[0], "chosen": spoken(t)[1], "rejected": spoken(other)[1]}
                for t, other in zip(some, texts(len(some), seed=3), strict=True)
            ]
        )
        for some in (job.texts, job.evaluated)
    )
    arguments = DPOConfig(
        output_dir=str(job.checkpoint.parent), per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=BATCH, gradient_accumulation_steps=ACCUMULATED,
        max_steps=job.steps, learning_rate=RATE, warmup_steps=WARM_UP, max_grad_norm=MAX_NORM,
        lr_scheduler_type="constant_with_warmup", weight_decay=DECAY, logging_steps=1,
        eval_strategy="no", save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
        train_sampling_strategy="sequential", bf16=False, gradient_checkpointing=False,
    )  # fmt: skip
    trainer = DPOTrainer(
        model=model, ref_model=reference, args=arguments, train_dataset=data,
        eval_dataset=evaluated, processing_class=tokenizer(), callbacks=[Until(job)],
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=str(job.checkpoint) if job.first else None)
    for entry in trainer.state.log_history:
        if entry["step"] > job.first and "train_runtime" not in entry:
            job.tell(**{k: entry[k] for k in entry.keys() - UNTOLD})
    return model
