"""Random numbers do not depend on the layout: all train as one process with the same seed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import merakc
from benchmarks.models import MODELS
from benchmarks.ranks import run_ranks
from merakc.equality.casts import lifted_casts
from merakc.machines.cluster import NOMINAL_CPU
from tests.battery.small_models import Tensors, part, warm_up

SAMPLES = 8
BOUND = 1e-10


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    warm_up()


@dataclass(frozen=True)
class Result:
    """Of two steps: the losses, and the gradients of both, added up."""

    losses: list[float]
    gradients: Tensors


Case = Callable[[], tuple[nn.Module, Tensors]]


def stock(name: str) -> Case:
    def case() -> tuple[nn.Module, Tensors]:
        found = MODELS[name]
        return found.model(torch.float64, dropout=0.1), found.batch(SAMPLES, torch.float64)

    return case


def images(build: Callable[[], nn.Module]) -> Case:
    def case() -> tuple[nn.Module, Tensors]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = build().double().train()
            pixels = torch.randn(SAMPLES, 3, 16, 16, dtype=torch.float64)
        return model, {"pixel_values": pixels, "labels": torch.arange(SAMPLES) % 5}

    return case


def swin() -> nn.Module:
    """A vision transformer whose residual branches are dropped for some samples, with attention in
    windows that are shifted.
    """
    config = transformers.SwinConfig(
        image_size=16, patch_size=2, embed_dim=8, depths=[2, 2], num_heads=[2, 2], window_size=2,
        drop_path_rate=0.4, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1, num_labels=5,
    )  # fmt: skip
    return transformers.SwinForImageClassification(config)


CASES: dict[str, Case] = {"gpt2": stock("gpt2"), "swin": images(swin)}


def train(name: str, options: dict[str, Any]) -> Result:
    model, batch = CASES[name]()
    dp = options.get("dp", 1)
    example = {k: v.chunk(dp)[0] for k, v in batch.items()}
    losses = []
    with lifted_casts():
        parallel = merakc.auto_parallel(model, example, cluster=NOMINAL_CPU, **options)
        for _ in range(2):
            loss = parallel(**part(batch, parallel))["loss"]
            loss.backward()
            losses.append(loss.item())
    return Result(losses, parallel.full_gradients())


LAYOUTS: tuple[dict[str, Any], ...] = (  # of two ranks
    {"dp": 2, "micro_batches": 2},
    {"pp": 2, "micro_batches": 4, "recompute": "full"},
)
OF_TP: tuple[dict[str, Any], ...] = (
    {"tp": 2, "micro_batches": 2, "sequence_parallel": False},
    {"tp": 2, "sequence_parallel": True},
)


def train_all(name: str, layouts: tuple[dict[str, Any], ...]) -> list[Result]:
    return [train(name, options) for options in layouts]


@pytest.mark.parametrize("name", CASES)
def test_every_layout_draws_alike(name: str) -> None:
    alone = train(name, {})
    assert alone.losses[0] != alone.losses[1]
    scale = max(g.abs().max().item() for g in alone.gradients.values())
    layouts = LAYOUTS + OF_TP * (name == "gpt2")
    parts = {"micro_batches": SAMPLES}  # of one sample
    first, second = run_ranks(2, train_all, name, layouts)
    for options, *ranks in ((parts, train(name, parts)), *zip(layouts, first, second, strict=True)):
        for each in ranks:
            assert each.losses == pytest.approx(alone.losses, rel=BOUND), options
        for key, wanted in alone.gradients.items():  # whole on the first rank
            error = (ranks[0].gradients[key] - wanted).abs().max().item()
            assert error < BOUND * scale, (options, key)
