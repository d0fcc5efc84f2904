"""A loop with accelerate."""

from __future__ import annotations

import torch
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from transformers import default_data_collator

import merakc
from benchmarks.loops.job import ACCUMULATED, BATCH, DECAY, MAX_NORM, RATE, Job, accuracy, warm_up
from merakc.integrations.accelerate import Accelerator  # merakc: from accelerate import Accelerator


def run(job: Job) -> torch.nn.Module:
    """Trains from `job.first` to `job.last`."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATED)
    model = job.model()
    model = merakc.auto_parallel(model, job.example, **job.layout)  # merakc
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY)
    scheduler = LambdaLR(optimizer, warm_up)
    loader = DataLoader(job.texts, BATCH, collate_fn=default_data_collator)
    evaluated = DataLoader(job.evaluated, BATCH, collate_fn=default_data_collator)
    model, optimizer, scheduler, loader, evaluated = accelerator.prepare(
        model, optimizer, scheduler, loader, evaluated
    )
    if job.first:
        accelerator.load_state(job.checkpoint)
        loader = accelerator.skip_first_batches(loader, job.first * ACCUMULATED)
    step, total = job.first, 0.0
    model.train()
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            total += loss.item() / ACCUMULATED
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if not accelerator.sync_gradients:
            continue
        job.tell(step=step + 1, loss=total, grad_norm=norm.item())
        if job.evaluates(step):
            model.eval()
            found = []
            for batch in evaluated:
                with torch.no_grad():
                    outputs = model(**batch)
                found.append(
                    accelerator.gather_for_metrics((outputs.logits, batch["labels"], outputs.loss))
                )
            logits, labels, losses = zip(*found, strict=True)
            right = accuracy(torch.cat(logits), torch.cat(labels))
            job.tell(step=step + 1, eval_loss=sum(x.item() for x in losses), eval_accuracy=right)
            model.train()
        step, total = step + 1, 0.0
        if step == job.last:
            break
    accelerator.save_state(job.checkpoint)
    return model
