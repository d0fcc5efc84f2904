"""The training that every contestant does: a Llama of random weights on random words, float32.

What runs it may have little installed beside torch and transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
import transformers
from torch import nn

Tensors = dict[str, torch.Tensor]

# With eps as large as the learning rate a step is never longer than the gradient, so that rounding
# stays rounding and weights can be compared (see benchmarks.reference).
LEARNING_RATE = 1e-2
ADAM_EPS = 1e-2
WEIGHT_DECAY = 1e-2
HEADS = 8


@dataclass(frozen=True, slots=True)
class Training:
    """The sizes: by default 8.4 million parameters, half a second a step of one core.

    Of the `ranks`, tp x pp hold one copy of the model together, neighbours in tp first.
    """

    ranks: int = 2
    samples: int = 4  # of a copy
    sequence: int = 128
    hidden: int = 256
    layers: int = 8
    vocabulary: int = 4096
    tp: int = 1
    pp: int = 1
    micro_batches: int = 1  # of a copy's samples

    @property
    def dp(self) -> int:
        """Copies of the model."""
        return self.ranks // (self.tp * self.pp)

    @property
    def tokens(self) -> int:
        """Of a step, over all ranks."""
        return self.dp * self.samples * self.sequence

    def dp_rank(self, rank: int) -> int:
        """Which copy a rank belongs to."""
        return rank // (self.tp * self.pp)

    def pp_rank(self, rank: int) -> int:
        """Which part of the layers a rank has."""
        return rank // self.tp % self.pp

    def tp_rank(self, rank: int) -> int:
        """Which part of each layer a rank has."""
        return rank % self.tp

    def alone(self) -> Training:
        """The same work in one process, in parts only where each copy of the model takes parts."""
        samples, copies = self.dp * self.samples, self.dp if self.micro_batches > 1 else 1
        parts = copies * self.micro_batches
        return replace(self, ranks=1, tp=1, pp=1, samples=samples, micro_batches=parts)

    def model(self) -> nn.Module:
        """The same freshly initialised model at every call."""
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.hidden * 8 // 3,
            num_hidden_layers=self.layers,
            num_attention_heads=HEADS,
            num_key_value_heads=HEADS,
            max_position_embeddings=self.sequence,
            use_cache=False,
        )
        model: nn.Module = transformers.LlamaForCausalLM(config)
        return model.train()

    def batch(self, step: int, dp_rank: int | None = None) -> Tensors:
        """The samples of one copy of the model in a step, or those of all."""
        generator = torch.Generator().manual_seed(step)
        shape = (self.dp * self.samples, self.sequence)
        ids = torch.randint(self.vocabulary, shape, generator=generator)
        own = ids if dp_rank is None else ids.chunk(self.dp)[dp_rank]
        return {"input_ids": own, "labels": own.clone()}


@dataclass(frozen=True, slots=True)
class Contestant:
    """A system with the model in it, on one rank.

    `step` trains on this rank's batch. `weights` gives the whole weights by the model's names, on
    rank 0; collective. `dp_rank` says whose samples are this rank's, where it is not as `Training`
    lays ranks out.
    """

    step: Callable[[Tensors], object]
    weights: Callable[[], Mapping[str, torch.Tensor]]
    dp_rank: int | None = None


def adamw(parameters: object) -> torch.optim.AdamW:
    """The optimizer of every contestant."""
    return torch.optim.AdamW(
        parameters,  # type: ignore[arg-type]
        lr=LEARNING_RATE,
        eps=ADAM_EPS,
        weight_decay=WEIGHT_DECAY,
    )


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Tensors], None]:
    """A step as in torch's tutorials."""

    def step(batch: Tensors) -> None:
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()

    return step


def split(batch: Tensors, parts: int) -> list[Tensors]:
    """A batch in micro-batches."""
    chunks = {name: value.chunk(parts) for name, value in batch.items()}
    return [{name: value[k] for name, value in chunks.items()} for k in range(parts)]


def gathered(parts: Tensors, training: Training, rank: int) -> Tensors:
    """On rank 0 the weights that all ranks hold; collective.

    Of a weight that several ranks hold the first one's counts.
    """
    found: list[Tensors | None] = [None] * training.ranks
    own = {name: part.detach().clone() for name, part in parts.items()}
    dist.gather_object(own, found if rank == 0 else None)
    whole: Tensors = {}
    for listed in reversed(found):
        whole |= listed or {}
    return whole


@torch.no_grad()
def first_gradients(
    before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]
) -> Tensors:
    """The gradients of the first step, from the weights before and after it.

    AdamW's first step takes lr · wd · w + lr · g / (|g| + eps) from w (Loshchilov and Hutter 2019,
    algorithm 2, whose corrected moments are g and g² then), which is solved for g.
    """
    found = {}
    for name, start in before.items():
        start = start.double()
        moved = start * (1 - LEARNING_RATE * WEIGHT_DECAY) - after[name].double()
        found[name] = ADAM_EPS * moved / (LEARNING_RATE - moved.abs())
    return found


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
