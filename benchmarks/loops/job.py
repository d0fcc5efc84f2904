"""What all programs are given: a small model, texts, and what they are to tell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import peft
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback

from merakc.machines.cluster import NOMINAL_CPU

LENGTH, VOCABULARY, BATCH, ACCUMULATED = 12, 64, 8, 2
RATE, DECAY, MAX_NORM, WARM_UP, EVALUATED = 1e-2, 0.1, 0.5, 4, 13
# What trainers log that is no number of the training; TRL counts tokens anew where a run goes on.
UNTOLD = {
    "epoch", "learning_rate", "eval_runtime", "eval_samples_per_second", "eval_steps_per_second",
    "num_tokens", "eval_num_tokens",
}  # fmt: skip
Batch = dict[str, torch.Tensor]


def warm_up(step: int) -> float:
    """The learning rate's factor."""
    return min(1.0, step / WARM_UP)


def with_loss(model: torch.nn.Module, batch: Batch) -> tuple[torch.Tensor, Any]:
    """The mean over all labels, for a model that makes no loss, and its outputs."""
    outputs = model(batch["input_ids"])
    logits, labels = outputs.logits[:, :-1], batch["labels"][:, 1:]
    return F.cross_entropy(logits.reshape(-1, VOCABULARY), labels.reshape(-1)), outputs


def accuracy(logits: torch.Tensor, labels: torch.Tensor) -> float:
    """The share of labels that are guessed."""
    known = labels[:, 1:] != -100
    return (logits[:, :-1].argmax(-1) == labels[:, 1:])[known].double().mean().item()


def tokenizer() -> PreTrainedTokenizerFast:
    """Of texts that are numbers, each of which is a token."""
    known = {"<pad>": 0, **{str(k): k for k in range(1, VOCABULARY - 1)}, "<eos>": VOCABULARY - 1}
    made = Tokenizer(models.WordLevel(known, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


def spoken(text: Batch) -> tuple[str, str]:
    """A text as numbers: a first part, and the one whose labels are known."""
    ids = [str(k) for k in text["input_ids"].clamp(max=VOCABULARY - 2).tolist()]
    start = max(1, int((text["labels"] == -100).sum()))
    return " ".join(ids[:start]), " " + " ".join(ids[start:])


def texts(count: int, seed: int) -> list[Batch]:
    """With unlike numbers of labels, so that batches weigh unlike."""
    drawn, found = torch.Generator().manual_seed(seed), []
    for _ in range(count):
        ids = torch.randint(1, VOCABULARY, (LENGTH,), generator=drawn)
        labels = ids.clone()
        labels[: int(torch.randint(0, 6, (), generator=drawn))] = -100
        found.append({"input_ids": ids, "labels": labels})
    return found


def stacked(some: list[Batch]) -> Batch:
    """A batch of texts."""
    return {name: torch.stack([t[name] for t in some]) for name in some[0]}


@dataclass
class Job:
    """Steps `first` to `last` of `steps`, on a layout, from a checkpoint and to another."""

    folder: Path
    layout: Mapping[str, Any]
    steps: int
    first: int
    last: int
    adapters: bool = False
    told: list[dict[str, float]] = field(default_factory=list)

    def model(self) -> Any:
        """A Llama in float64, or adapters around it."""
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, use_cache=False,
        )  # fmt: skip
        model = LlamaForCausalLM(config).double()
        if not self.adapters:
            return model
        lora = peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
        return peft.get_peft_model(model, lora, autocast_adapter_dtype=False)

    @property
    def checkpoint(self) -> Path:
        """Where a run is saved, and goes on from."""
        return self.folder / f"checkpoint-{self.first or self.last}"

    @cached_property
    def texts(self) -> list[Batch]:
        """What is trained on, once."""
        return texts(self.steps * ACCUMULATED * BATCH, seed=1)

    @cached_property
    def evaluated(self) -> list[Batch]:
        """What is evaluated: no multiple of a batch, where programs read it by batches."""
        return texts(EVALUATED, seed=2)

    @property
    def evaluation(self) -> Batch:
        """All of it at once."""
        return stacked(self.evaluated)

    @property
    def example(self) -> Batch:
        """A batch."""
        return stacked(self.texts[:BATCH])

    def batches(self, step: int) -> list[Batch]:
        """Those of a step."""
        start, size = step * ACCUMULATED * BATCH, ACCUMULATED * BATCH
        some = self.texts[start : start + size]
        return [stacked(some[k : k + BATCH]) for k in range(0, size, BATCH)]

    def evaluates(self, step: int) -> bool:
        """Whether the model is evaluated after a step."""
        return (step + 1) in (self.steps // 2, self.steps)

    @property
    def arguments(self) -> dict[str, Any]:
        """What trainers of transformers and TRL are told."""
        return {
            "output_dir": str(self.checkpoint.parent), "max_steps": self.steps,
            "per_device_train_batch_size": BATCH, "per_device_eval_batch_size": BATCH,
            "gradient_accumulation_steps": ACCUMULATED, "max_grad_norm": MAX_NORM,
            "learning_rate": RATE, "warmup_steps": WARM_UP, "weight_decay": DECAY,
            "lr_scheduler_type": "constant_with_warmup", "train_sampling_strategy": "sequential",
            "eval_strategy": "no", "save_strategy": "no", "logging_steps": 1, "report_to": [],
            "use_cpu": True, "disable_tqdm": True, "bf16": False, "gradient_checkpointing": False,
        }  # fmt: skip

    def train(self, trainer: Any) -> None:
        """Has such a trainer train, from the checkpoint on, and tells what it has logged."""
        trainer.train(resume_from_checkpoint=str(self.checkpoint) if self.first else None)
        for entry in trainer.state.log_history:
            if entry["step"] > self.first and "train_runtime" not in entry:
                self.tell(**{k: entry[k] for k in entry.keys() - UNTOLD})

    def tell(self, **numbers: float) -> None:
        """What a step or an evaluation has found."""
        self.told.append(numbers)


class Until(TrainerCallback):
    """Stops a run of transformers' Trainer in its middle, and saves it."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """After a step."""
        control.should_evaluate = self.job.evaluates(state.global_step - 1)
        if state.global_step == self.job.last:
            control.should_save = control.should_training_stop = True


def on(layout: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `auto_parallel` for a layout."""
    return {"cluster": NOMINAL_CPU, **layout}
