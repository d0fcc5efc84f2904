"""TRL's fine-tuning of completions."""

from __future__ import annotations

import torch
from datasets import Dataset
from trl import SFTConfig

import merakc
from benchmarks.loops.job import Job, Until, spoken, tokenizer
from merakc.integrations.trl import SFTTrainer  # merakc: from trl import SFTTrainer


def run(job: Job) -> torch.nn.Module:
    """Trains from `job.first` to `job.last`."""
    model = job.model()
    model = merakc.auto_parallel(model, job.example, **job.layout)  # merakc
    data, evaluated = (
        Dataset.from_list([{"prompt": spoken(t)[0], "completion": spoken(t)[1]} for t in some])
        for some in (job.texts, job.evaluated)
    )
    arguments = SFTConfig(**job.arguments)
    trainer = SFTTrainer(
        model=model, args=arguments, train_dataset=data, eval_dataset=evaluated,
        processing_class=tokenizer(), callbacks=[Until(job)],
    )  # fmt: skip
    job.train(trainer)
    return model
