"""The training that every contestant does: a Llama of random weights on random words, float32.

What runs it may have little installed beside torch and transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import transformers
from torch import nn

Tensors = dict[str, torch.Tensor]

# With eps as large as the learning rate a step is never longer than the gradient, so that rounding
# stays rounding and weights can be compared (see benchmarks.reference).
LEARNING_RATE = 1e-2
ADAM_EPS = 1e-2


@dataclass(frozen=True, slots=True)
class Training:
    """The sizes: by default 8.4 million parameters, half a second a step of one core."""

    ranks: int = 2
    samples: int = 4  # of a rank
    sequence: int = 128
    hidden: int = 256
    layers: int = 8
    vocabulary: int = 4096

    def model(self) -> nn.Module:
        """The same freshly initialised model at every call."""
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.hidden * 8 // 3,
            num_hidden_layers=self.layers,
            num_attention_heads=8,
            num_key_value_heads=8,
            max_position_embeddings=self.sequence,
            use_cache=False,
        )
        model: nn.Module = transformers.LlamaForCausalLM(config)
        return model.train()

    def batch(self, step: int, rank: int | None = None) -> Tensors:
        """A rank's samples of a step, or those of all ranks."""
        generator = torch.Generator().manual_seed(step)
        shape = (self.ranks * self.samples, self.sequence)
        ids = torch.randint(self.vocabulary, shape, generator=generator)
        own = ids if rank is None else ids.chunk(self.ranks)[rank]
        return {"input_ids": own, "labels": own.clone()}


@dataclass(frozen=True, slots=True)
class Contestant:
    """A system with the model in it, on one rank.

    `step` trains on this rank's batch. `weights` gives the whole weights by the model's names, on
    rank 0; collective.
    """

    step: Callable[[Tensors], object]
    weights: Callable[[], Mapping[str, torch.Tensor]]


def adamw(parameters: object) -> torch.optim.AdamW:
    """The optimizer of every contestant."""
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, eps=ADAM_EPS)  # type: ignore[arg-type]


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Tensors], None]:
    """A step as in torch's tutorials."""

    def step(batch: Tensors) -> None:
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()

    return step


def train_alone(training: Training, steps: int) -> tuple[Tensors, Tensors]:
    """The weights before and after `steps` steps of one process on the batches of all ranks."""
    model = training.model()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    step = plain_step(model, adamw(model.parameters()))
    for k in range(steps):
        step(training.batch(k))
    return before, {name: p.detach() for name, p in model.named_parameters()}


@torch.no_grad()
def largest_error(found: Mapping[str, torch.Tensor], before: Tensors, after: Tensors) -> float:
    """How far weights are from `after`, relative to the way from `before`: the worst parameter.

    Raises `ValueError` where names or shapes differ.
    """
    if found.keys() != after.keys():
        raise ValueError(f"weights differ in names: {sorted(found.keys() ^ after.keys())}")
    errors = []
    for name, right in after.items():
        if found[name].shape != right.shape:
            raise ValueError(f"{name} has shape {found[name].shape}, not {right.shape}")
        way = torch.linalg.vector_norm((right - before[name]).double())
        off = torch.linalg.vector_norm((found[name] - right).double())
        errors.append(float(off / way))
    return max(errors)
