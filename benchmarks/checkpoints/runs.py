"""Small runs that are saved and loaded: models, layouts, precisions, and what they come to."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import merakc
from benchmarks.models import MODELS, ModelCase
from merakc.ir.program import Mesh
from merakc.machines.cluster import NOMINAL_CPU

BATCH_SIZE, DROPOUT = 8, 0.1
Tensors = dict[str, torch.Tensor]


def _lora(dropout: float) -> nn.Module:
    import peft

    config = peft.LoraConfig(r=2, lora_dropout=dropout, init_lora_weights=False)
    return peft.get_peft_model(MODELS["gpt2"].build(dropout), config)  # type: ignore[arg-type]


CASES: dict[str, ModelCase] = {
    **{name: MODELS[name] for name in ("gpt2", "llama", "llama_tied", "t5", "mixtral", "resnet")},
    "lora": replace(MODELS["gpt2"], name="lora", build=_lora),
}
PRECISIONS = (None, "bf16-mixed", "fp16-mixed")  # None: all of it float64
STATES = ("zero-0", "zero-1", "zero-2", "zero-3", "mixed")


@dataclass(frozen=True)
class Layout:
    """Degrees, the sharding of state over dp, and what computes."""

    mesh: Mesh
    state: str = "zero-0"
    precision: str | None = None

    @property
    def options(self) -> dict[str, Any]:
        """As `auto_parallel` takes them. Every micro-batch has as many samples, for the sake of
        batch statistics, on any layout.
        """
        dp, tp, pp = self.mesh.dp, self.mesh.tp, self.mesh.pp
        state: Any = self.state
        if state == "mixed":
            state = (1, dp, dp) if pp == 1 else [(1, 1, dp), *[(dp, dp, dp)] * (pp - 1)]
        return {
            "dp": dp, "tp": tp, "pp": pp, "micro_batches": 4 // dp, "precision": self.precision,
            "state_shards": state if dp > 1 else None, "schedule": "1f1b", "overlap": 0,
        }  # fmt: skip

    def __str__(self) -> str:
        return f"dp{self.mesh.dp} tp{self.mesh.tp} pp{self.mesh.pp} {self.state}"


def random_layout(pick: random.Random, precision: str | None, ranks: tuple[int, ...]) -> Layout:
    """Any layout of so many ranks at most."""
    count = pick.choice(ranks)
    meshes = [
        Mesh(dp, tp, pp)
        for dp in (1, 2, 4) for tp in (1, 2, 3, 4) for pp in (1, 2, 4)
        if dp * tp * pp == count
    ]  # fmt: skip
    mesh = pick.choice(meshes)
    return Layout(mesh, pick.choice(STATES) if mesh.dp > 1 else "zero-0", precision)


class Run:
    """A run on this rank: model, optimizer and scheduler, as before the first step."""

    def __init__(self, name: str, layout: Layout) -> None:
        dtype = torch.float32 if layout.precision else torch.float64
        self.name, self.layout = name, layout
        self.model = merakc.auto_parallel(
            CASES[name].model(dtype, dropout=DROPOUT), own_batch(name, layout, 0, 0),
            cluster=NOMINAL_CPU, seed=3, **layout.options,
        )  # fmt: skip
        trained = [p for p in self.model.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in trained if p.dim() < 2]},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.LinearLR(self.optimizer, 1.0, 0.1, 20)
        self.next = 0  # step

    @property
    def parts(self) -> tuple[Any, ...]:
        """What a checkpoint is of."""
        return self.model, self.optimizer, self.scheduler

    def save(self, folder: Path, **options: Any) -> merakc.Saving:
        """A checkpoint of it."""
        return merakc.save(folder, *self.parts, {"next": self.next}, **options)

    def load(self, folder: Path) -> None:
        """Goes on where that one was saved."""
        self.next = merakc.load(folder, *self.parts).extra["next"]

    def steps(
        self, last: int, after: Callable[[Run], None] = lambda _: None
    ) -> tuple[list[float], Tensors]:
        """The losses of the steps before `last`, and on rank 0 the weights then."""
        losses = []
        while self.next < last:
            batch = own_batch(self.name, self.layout, self.next, self.model.data_parallel_rank)
            loss = self.model(**batch)["loss"]
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            losses.append(loss.item())
            self.next += 1
            after(self)
        return losses, self.model.full_state_dict()


def own_batch(name: str, layout: Layout, step: int, dp_rank: int) -> Tensors:
    """A dp rank's part of the batch of a step."""
    dtype = torch.float32 if layout.precision else torch.float64
    whole = CASES[name].batch(BATCH_SIZE, dtype, seed=step)
    return {k: v.chunk(layout.mesh.dp)[dp_rank] for k, v in whole.items()}


def warm() -> None:
    """Does torch's imports in this process, so that forked ranks need not."""
    for name in CASES:
        Run(name, Layout(Mesh(1, 1, 1))).steps(1)


def one_thread() -> None:
    """Ranks share few cores."""
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
