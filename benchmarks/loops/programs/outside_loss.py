"""A loop of one's own, with the loss outside the model, made of its outputs."""

from __future__ import annotations

import torch
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR

import merakc
from benchmarks.loops.job import (
    ACCUMULATED,
    DECAY,
    MAX_NORM,
    RATE,
    Job,
    accuracy,
    warm_up,
    with_loss,
)


def run(job: Job) -> torch.nn.Module:
    """Trains from `job.first` to `job.last`."""
    model = job.model()
    model = merakc.auto_parallel(model, job.example, **job.layout)  # merakc
    model.read_whole_batches()  # merakc
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY)
    scheduler = LambdaLR(optimizer, warm_up)
    if job.first:
        merakc.load(job.checkpoint, model, optimizer, scheduler)
    for step in range(job.first, job.last):
        model.train()
        total = 0.0
        for batch in job.batches(step):
            loss = with_loss(model, batch)[0] / ACCUMULATED
            loss.backward()
            total += loss.item()
        norm = clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        job.tell(step=step + 1, loss=total, grad_norm=norm.item())
        if job.evaluates(step):
            model.eval()
            with torch.no_grad():
                loss, outputs = with_loss(model, job.evaluation)
            right = accuracy(outputs.logits, job.evaluation["labels"])
            job.tell(step=step + 1, eval_loss=loss.item(), eval_accuracy=right)
    merakc.save(job.checkpoint, model, optimizer, scheduler)
    return model
