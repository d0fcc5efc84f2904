"""TRL's fine-tuning of completions."""

from __future__ import annotations

import torch
from datasets import Dataset
from trl import SFTConfig

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
    tokenizer,
)
from merakc.integrations.trl import SFTTrainer  # merakc: from trl import SFTTrainer


def run(job: Job) -> torch.nn.Module:
    """Trains from `job.first` to `job.last`."""
    model = job.model()
    model = merakc.auto_parallel(model, job.example, **job.layout)  # merakc
    data, evaluated = (
        Dataset.from_list([{"prompt": spoken(t)[0], "completion": spoken(t)[1]} for t in some])
        for some in (job.texts, job.evaluated)
    )
    arguments = SFTConfig(
        output_dir=str(job.checkpoint.parent), per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=BATCH, gradient_accumulation_steps=ACCUMULATED,
        max_steps=job.steps, learning_rate=RATE, warmup_steps=WARM_UP, max_grad_norm=MAX_NORM,
        lr_scheduler_type="constant_with_warmup", weight_decay=DECAY, logging_steps=1,
        eval_strategy="no", save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
        train_sampling_strategy="sequential", bf16=False, gradient_checkpointing=False,
    )  # fmt: skip
    trainer = SFTTrainer(
        model=model, args=arguments, train_dataset=data, eval_dataset=evaluated,
        processing_class=tokenizer(), callbacks=[Until(job)],
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=str(job.checkpoint) if job.first else None)
    for entry in trainer.state.log_history:
        if entry["step"] > job.first and "train_runtime" not in entry:
            job.tell(**{k: entry[k] for k in entry.keys() - UNTOLD})
    return model
