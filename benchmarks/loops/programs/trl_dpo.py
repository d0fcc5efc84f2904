"""TRL's training by preferences, with a model of reference."""

from __future__ import annotations

from dataclasses import replace

import torch
from datasets import Dataset
from trl import DPOConfig

import merakc
from benchmarks.loops.job import Job, Until, spoken, texts, tokenizer
from merakc.integrations.trl import DPOTrainer  # merakc: from trl import DPOTrainer


def run(job: Job) -> torch.nn.Module:
    """Trains from `job.first` to `job.last`."""
    model, reference = job.model(), replace(job, adapters=False).model()
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
    arguments = DPOConfig(**job.arguments)
    trainer = DPOTrainer(
        model=model, ref_model=reference, args=arguments, train_dataset=data,
        eval_dataset=evaluated, processing_class=tokenizer(), callbacks=[Until(job)],
    )  # fmt: skip
    job.train(trainer)
    return model
