"""Ranks that share sequences train as one process does."""

from __future__ import annotations

import copy
import math
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import merakc
from benchmarks.expert_loops import EXPERT_LOOPS
from benchmarks.layouts import Task, train_layout, worst_difference
from benchmarks.models import MODELS
from benchmarks.ranks import run_ranks
from benchmarks.reference import train_reference
from benchmarks.zoo_models import ZOO
from merakc.equality.compare import Reference
from merakc.ir.program import Mesh
from merakc.ir.state import ShardsGiven
from merakc.machines.cluster import NOMINAL_CPU
from tests.battery.small_models import clipped_steps

STEPS, BATCH_SIZE, MICRO_BATCHES = 2, 8, 4
# Grouped heads, and tied embeddings over two stages; two sequences; an odd number of patches. The
# state is sharded over cp, in several ways, and not at all.
CASES: list[tuple[str, Mesh, ShardsGiven | None]] = [
    ("llama_tied", Mesh(cp=2, pp=2), "zero-1"),
    ("t5", Mesh(cp=2), None),
    ("vit", Mesh(cp=2), "zero-3"),
    ("gpt2", Mesh(tp=2, cp=2), "zero-1"),
    ("t5", Mesh(tp=2, cp=2), None),
]


@cache
def reference(model: str) -> Reference:
    return train_reference(
        {**ZOO, **MODELS, **EXPERT_LOOPS}[model], batch_size=BATCH_SIZE,
        micro_batches=MICRO_BATCHES, steps=STEPS, lift_casts=True,
    )  # fmt: skip


@pytest.mark.parametrize(("model", "mesh", "shards"), CASES, ids=str)
def test_training_equals_one_process(model: str, mesh: Mesh, shards: ShardsGiven | None) -> None:
    task = Task(
        MODELS[model], mesh, BATCH_SIZE, MICRO_BATCHES, STEPS, lift_casts=True,
        cluster=NOMINAL_CPU, state_shards=shards,
    )  # fmt: skip
    found = run_ranks(mesh.world_size, partial(train_layout, task))
    losses = [f.losses for f in found]
    assert worst_difference(found[0], losses, reference(model), 1e-10).error < 1e-10


class Mixes(nn.Module):
    """What runs along a sequence in many ways: a mean, a shift, a running sum, padding hidden."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.out = nn.Embedding(11, 8), nn.Linear(8, 11)
        self.place = nn.Parameter(torch.randn(1, 7, 8))
        self.query = nn.Parameter(torch.randn(1, 3, 8))
        self.gain = nn.Parameter(torch.randn(8))
        self.register_buffer("seen", torch.zeros(7, 8))  # of each place
        self.double()

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Labels below 0 do not count."""
        x = self.words(ids) * self.gain.sort().values + self.place
        self.seen = 0.5 * self.seen + x.detach().mean(0)
        seen = (ids > 0)[:, None, None, :]
        x = x + F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], seen)[:, 0]
        asked = self.query.expand(len(ids), -1, -1)[:, None]
        x = x + F.scaled_dot_product_attention(asked, x[:, None], x[:, None])[:, 0].sum(1)[:, None]
        x = x + x.roll(1, 1) + x.cumsum(1) / 7 + x.mean(1, keepdim=True).tanh()
        logits = self.out(x.tanh())
        far = F.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:], ignore_index=-1)
        return {"loss": far + logits.square().mean() + x.amax((1, 2)).mean()}


class Rare(Mixes):
    """Gradients by how often a word comes in the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 8, scale_grad_by_freq=True).double()


def _rare(ids: torch.Tensor) -> float:
    torch.manual_seed(0)
    plain = Rare()
    shared = merakc.auto_parallel(
        copy.deepcopy(plain), (ids, ids), dp=1, cp=3, pp=1, micro_batches=1, cluster=NOMINAL_CPU
    )
    shared(ids, ids)["loss"].backward()
    plain(ids, ids)["loss"].backward()
    found = shared.full_gradients().items()
    return max(((g - plain.get_parameter(n).grad).abs().max().item() for n, g in found), default=0)


def test_words_are_counted_over_all_ranks() -> None:
    ids = torch.randint(5, (4, 7), generator=torch.Generator().manual_seed(1))
    assert max(run_ranks(3, partial(_rare, ids))) < 1e-12


def _mixed(micro_batches: int, ids: torch.Tensor) -> float:
    """The largest difference of a gradient."""
    labels = torch.where(ids % 3 == 0, -1, ids)
    plain = Mixes()
    plain(ids, labels)["loss"].backward()
    shared = merakc.auto_parallel(
        Mixes(), (ids, labels), dp=1, cp=3, pp=1, micro_batches=micro_batches, cluster=NOMINAL_CPU
    )
    loss = shared(ids, labels)["loss"]
    loss.backward()
    found = [abs(loss.item() - plain(ids, labels)["loss"].item())]
    if micro_batches == 1:
        plain, state = Mixes(), shared.full_state_dict()
        plain(ids, labels)["loss"].backward()
        found += [(state["seen"] - plain.seen).abs().max().item() for _ in range(bool(state))]
    for name, gradient in shared.full_gradients().items():
        found.append((gradient - plain.get_parameter(name).grad).abs().max().item())
    return max(found)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_sequence_may_be_read_in_any_way(micro_batches: int) -> None:
    """7 rows over 3 ranks; a mean over all labels that count, of one micro-batch or of two."""
    ids = torch.randint(11, (4, 7), generator=torch.Generator().manual_seed(1))
    assert max(run_ranks(3, partial(_mixed, micro_batches, ids))) < 1e-12


def _short(name: str, degrees: dict[str, int]) -> tuple[float, float]:
    """Losses in eval mode of sequences of one token, of the plain model and with its ranks."""
    task = MODELS[name]
    dtype = torch.float64 if "cp" in degrees else torch.float32  # of torch's products of groups
    model = task.model(dtype)
    ids = torch.arange(8).view(4, 2)
    shared = merakc.auto_parallel(
        model, {"input_ids": ids, "labels": ids}, dp=1, pp=1, cluster=NOMINAL_CPU, **degrees
    )
    one = torch.arange(4).view(4, 1)
    with torch.no_grad():
        plain = task.model(dtype).eval()(input_ids=one).logits
        logits = shared.eval()(input_ids=one).logits
    return (logits - plain).abs().max().item(), plain.abs().max().item()


@pytest.mark.parametrize(
    ("name", "degrees"),
    [("llama", {"cp": 2}), ("mixtral", {"ep": 2, "tp": 1}), ("mixtral", {"ep": 2, "tp": 2})],
    ids=str,
)
def test_sequences_of_fewer_rows_than_ranks_are_computed_whole(
    name: str, degrees: dict[str, int]
) -> None:
    for difference, size in run_ranks(math.prod(degrees.values()), _short, name, degrees):
        assert difference < 1e-6 * size


class Squashed(torch.autograd.Function):
    """Of which the backward is no sum of what it makes of parts of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x / 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad.clamp(-1e-3, 1e-3)


class Regular(nn.Module):
    """Weights that are read on parts and whole, by the loss, and by a function of the user's where
    a batch is in one part: gradients of several would not add up.
    """

    def __init__(self, *, squashes: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.squashes = squashes
        self.words, self.inner, self.out = nn.Embedding(11, 8), nn.Linear(8, 8), nn.Linear(8, 11)
        self.scale = nn.Parameter(torch.ones(8))
        self.unused = nn.Linear(8, 2)
        self.double()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)[:, None]
        x = F.scaled_dot_product_attention(x, x, x, is_causal=True)[:, 0] * self.scale.exp()
        inner = Squashed.apply(self.inner.weight) if self.squashes else self.inner.weight
        x = F.linear(x, inner, self.inner.bias).tanh()
        x = x + x.flip(1) * self.scale
        far = F.cross_entropy(self.out(x).transpose(1, 2), ids)
        return far + 0.1 * self.out.weight.square().sum() + self.scale.sum()


Found = tuple[list[float], dict[str, torch.Tensor]]


def _regular(layout: dict[str, Any] | None, squashes: bool, folder: Path) -> Found:
    """Losses and norms of steps on sequences of several lengths, one too short to be shared, and
    the weights; with a `layout` saved in the middle, and gone on with from there.
    """
    draw = torch.Generator().manual_seed(1)
    batches = [torch.randint(11, (4, length), generator=draw) for length in (7, 1, 6, 1)]
    model: Any = Regular(squashes=squashes)
    if layout:
        model = merakc.auto_parallel(model, (batches[0],), pp=1, cluster=NOMINAL_CPU, **layout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    own = slice(None)
    if layout and layout["dp"] > 1:
        own = slice(2 * model.data_parallel_rank, 2 * model.data_parallel_rank + 2)
    found = clipped_steps(model, optimizer, [ids[own] for ids in batches], layout and folder)
    return found, model.full_state_dict() if layout else model.state_dict()


@pytest.mark.parametrize(
    "layout",
    [
        {"dp": 1, "cp": 2, "state_shards": "zero-3"},
        {"dp": 2, "cp": 2, "state_shards": (1, 2, 2), "micro_batches": 2},
    ],
    ids=str,
)
def test_the_ranks_of_cp_share_the_state(layout: dict[str, Any], tmp_path: Path) -> None:
    """Norms, clipping and checkpoints count every element once; weights of every kind of use get
    the gradient of one process, also where all ranks compute the same.
    """
    squashes = layout["dp"] == 1
    (wanted, weights), *_ = run_ranks(1, _regular, None, squashes, tmp_path)
    every = run_ranks(layout["dp"] * layout["cp"], _regular, layout, squashes, tmp_path)
    for found, _ in every:
        assert found == pytest.approx(wanted, rel=1e-12)
    for name, value in weights.items():
        torch.testing.assert_close(every[0][1][name], value, rtol=1e-10, atol=1e-12)
