"""Small models and helpers of the battery: float64, and compared with one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import merakc
from merakc.machines.cluster import NOMINAL_CPU
from merakc.train.model import ParallelModel

Tensors = dict[str, torch.Tensor]
WIDTH, WORDS, LENGTH = 8, 16, 6


class Words(nn.Module):
    """A tied language model: embedding, blocks with norms and dropout, tied head."""

    def __init__(self, blocks: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(WIDTH),
                nn.Linear(WIDTH, 2 * WIDTH),
                nn.GELU(),
                nn.Linear(2 * WIDTH, WIDTH),
                nn.Dropout(dropout),
            )
            for _ in range(blocks)
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> Tensors:
        """The logits, and the mean loss over the labels that are not -100."""
        x = self.embedding(ids)
        for block in self.blocks:
            x = x + block(x)
        logits = self.head(self.norm(x))
        if labels is None:
            return {"logits": logits}
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def build(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """The model in float64, with the same weights at every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make().double()


def words(seed: int, batch_size: int = 8, length: int = LENGTH) -> Tensors:
    """A batch for `Words`, with ever fewer labels: one for the last sample, all for the first."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, WORDS, (batch_size, length), generator=generator)
    labels = torch.randint(0, WORDS, (batch_size, length), generator=generator)
    kept = torch.linspace(length, 1, batch_size).long()
    return {"ids": ids, "labels": labels.masked_fill(torch.arange(length) >= kept[:, None], -100)}


def part(batch: Tensors, model: ParallelModel) -> Tensors:
    """What a rank is given of a whole batch."""
    return {
        name: value.chunk(model.data_parallel_size)[model.data_parallel_rank]
        for name, value in batch.items()
    }


def first_part(batch: Tensors, dp: int) -> Tensors:
    """An example batch."""
    return {name: value.chunk(dp)[0] for name, value in batch.items()}


def parallel(make: Callable[[], nn.Module], batch: Tensors, **options: Any) -> ParallelModel:
    """The model on all ranks that run; `batch` is the whole one."""
    example = first_part(batch, options.get("dp", 1))
    options = {"cluster": NOMINAL_CPU, **options}
    return merakc.auto_parallel(build(make), example, **options)


def assert_close(ours: Mapping[str, torch.Tensor], plain: Mapping[str, torch.Tensor]) -> None:
    """Equal names, and values equal to rounding in float64."""
    assert ours.keys() == plain.keys()
    for name, value in plain.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-11, atol=1e-13, msg=name)


def gradients(model: nn.Module) -> Tensors:
    """The gradients of a plain model."""
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def clipped_steps(
    model: Any, optimizer: torch.optim.Optimizer, batches: Sequence[torch.Tensor],
    folder: Path | None,
) -> list[float]:  # fmt: skip
    """Losses and norms of steps; with a `folder` saved there after the second one, and gone on with
    from there.
    """
    found: list[float] = []
    for step, batch in enumerate(batches):
        loss = model(batch)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        found += [loss.item(), float(norm)]
        if folder and step == 1:
            merakc.save(folder, model, optimizer)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(0)
            merakc.load(folder, model, optimizer)
    return found


@cache
def warm_up() -> None:
    """Does torch's lazy imports in this process, so that its forked ranks need not."""
    model = parallel(lambda: Words(blocks=1), words(0))
    model(**words(0))["loss"].backward()
