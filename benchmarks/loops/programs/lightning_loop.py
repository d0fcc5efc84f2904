"""Lightning's Trainer."""

from __future__ import annotations

from typing import Any

import lightning.pytorch
import torch
from torch.nn.utils import get_total_norm
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from transformers import default_data_collator

import merakc
from benchmarks.loops.job import ACCUMULATED, BATCH, DECAY, MAX_NORM, RATE, Job, accuracy, warm_up
from merakc.integrations.lightning import Trainer  # merakc: from lightning.pytorch import Trainer


class Module(lightning.pytorch.LightningModule):
    """A model with its training."""

    def __init__(self, model: Any, job: Job) -> None:
        super().__init__()
        self.model, self.job, self.total, self.norm = model, job, 0.0, 0.0

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        """The loss of a batch."""
        loss: torch.Tensor = self.model(**batch).loss
        self.total += loss.item() / ACCUMULATED
        return loss

    def on_before_optimizer_step(self, _: Any) -> None:
        """The norm, before it is clipped."""
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        self.norm = get_total_norm(gradients).item()

    def on_train_batch_end(self, *_: Any) -> None:
        """Tells of a step behind its last batch."""
        if self.norm:
            self.job.tell(step=self.global_step, loss=self.total, grad_norm=self.norm)
            self.total = self.norm = 0.0

    def validation_step(self, batch: Any, _: int) -> None:
        """Metrics, which Lightning takes the mean of over samples."""
        outputs, size = self.model(**batch), len(batch["labels"])
        right = accuracy(outputs.logits, batch["labels"])
        self.log("eval_loss", outputs.loss, batch_size=size)
        self.log("eval_accuracy", right, batch_size=size)

    def on_validation_epoch_end(self) -> None:
        """Tells of an evaluation."""
        if not self.trainer.sanity_checking:
            found = self.trainer.callback_metrics
            self.job.tell(
                step=self.global_step, eval_loss=found["eval_loss"].item(),
                eval_accuracy=found["eval_accuracy"].item(),
            )  # fmt: skip

    def configure_optimizers(self) -> Any:
        """AdamW with warm-up."""
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=RATE, weight_decay=DECAY)
        scheduler = LambdaLR(optimizer, warm_up)
        by_step = {"scheduler": scheduler, "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": by_step}


def run(job: Job) -> torch.nn.Module:
    """Trains from `job.first` to `job.last`."""
    model = job.model()
    model = merakc.auto_parallel(model, job.example, **job.layout)  # merakc
    rest = job.texts[job.first * ACCUMULATED * BATCH :]
    loader = DataLoader(rest, BATCH, collate_fn=default_data_collator)
    evaluated = DataLoader(job.evaluated, BATCH, collate_fn=default_data_collator)
    trainer = Trainer(
        max_steps=job.last, accumulate_grad_batches=ACCUMULATED, gradient_clip_val=MAX_NORM,
        val_check_interval=job.steps // 2 * ACCUMULATED, accelerator="cpu", logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        num_sanity_val_steps=0,
    )  # fmt: skip
    resumed = job.checkpoint if job.first else None
    trainer.fit(Module(model, job), loader, evaluated, ckpt_path=resumed)
    trainer.save_checkpoint(job.checkpoint)
    return model
