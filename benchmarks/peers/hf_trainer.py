"""transformers' `Trainer`, whose own loop is fed a batch at a time.

`train` runs in a thread and asks a queue for batches, so that steps can be timed from outside.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator
from queue import Queue
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from benchmarks.peers.training import Contestant, Tensors, Training, adamw

MANY_STEPS = 10**6


class Fed(Trainer):
    """Takes this rank's batches as they come."""

    given: Queue[Tensors]

    def get_train_dataloader(self) -> Any:
        """What is iterated over in place of a data loader."""
        return self

    def __len__(self) -> int:
        return MANY_STEPS

    def __iter__(self) -> Iterator[Tensors]:
        while True:
            yield self.given.get()


class Reporting(TrainerCallback):
    """Says when a step has ended."""

    def __init__(self, ended: Queue[BaseException | None]) -> None:
        self.ended = ended

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """The optimizer has stepped."""
        self.ended.put(None)


def build(training: Training, form: str, rank: int) -> Contestant:
    """The model on this rank; `form` is not used."""
    model = training.model()
    arguments = TrainingArguments(
        tempfile.gettempdir(),
        use_cpu=True,
        max_steps=MANY_STEPS,
        per_device_train_batch_size=training.samples,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Fed(model=model, args=arguments, train_dataset=_Nothing(),
                  optimizers=(adamw(model.parameters()), None))  # fmt: skip
    return contestant_of(trainer, model)


def contestant_of(trainer: Fed, model: torch.nn.Module) -> Contestant:
    """Feeds a trainer, whose `train` begins with the first batch."""
    trainer.given = Queue()
    ended: Queue[BaseException | None] = Queue()
    trainer.add_callback(Reporting(ended))

    def run() -> None:
        torch.set_num_threads(1)  # is of the thread that asks for it
        try:
            trainer.train()
        except BaseException as error:
            ended.put(error)

    thread = threading.Thread(target=run, daemon=True)

    def step(batch: Tensors) -> None:
        if not thread.is_alive():
            thread.start()
        trainer.given.put(batch)
        error = ended.get()
        if error is not None:
            raise error

    return Contestant(step, lambda: dict(model.named_parameters()))


class _Nothing(torch.utils.data.Dataset[Tensors]):
    """The data set that `Trainer` asks for and `Fed` does not read."""

    def __len__(self) -> int:
        return MANY_STEPS
