"""Blocks made again in the backward: not a bit changes, and memory is what was predicted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import merakc
from benchmarks.memory import peak_live_bytes
from benchmarks.models import MODELS, Batch
from benchmarks.ranks import run_ranks
from merakc.errors import FitError
from merakc.machines.cluster import NOMINAL_CPU
from tests.battery.small_models import Words, parallel, part, warm_up, words

# Loss, gradients, weights after a step; predicted and measured peak.
Found = tuple[float, dict[str, torch.Tensor], dict[str, torch.Tensor], int, int]


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    warm_up()


class Skips(nn.Module):
    """Layers whose first results are read by the last, as in a U-Net."""

    def __init__(self, width: int = 64, depth: int = 6) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.up = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(depth))
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A loss."""
        skips = []
        for layer in self.down:
            x = self.drop(torch.nn.functional.gelu(layer(x)))
            skips.append(x)
        for layer in self.up:
            x = torch.nn.functional.gelu(layer(torch.cat([x, skips.pop()], -1)))
        return x.square().mean()


def plain() -> nn.Module:
    return nn.Sequential(*(m for _ in range(12) for m in (nn.Linear(64, 64), nn.Tanh())))


class Chain(nn.Module):
    """A plain chain of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = plain()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A loss."""
        return self.layers(x).square().mean()


def rows() -> Batch:
    return {"x": torch.randn(512, 64, generator=torch.Generator().manual_seed(1))}


CASES: dict[str, Callable[[], tuple[nn.Module, Batch]]] = {
    "gpt2": lambda: (MODELS["gpt2"].model(dropout=0.1), MODELS["gpt2"].batch(16)),
    "chain": lambda: (Chain(), rows()),
    "skips": lambda: (Skips(), rows()),
}


def train(name: str, recompute: str | float, **options: Any) -> Found:
    torch.manual_seed(0)
    model, batch = CASES[name]()
    run = merakc.auto_parallel(
        model.train(), batch, micro_batches=1, recompute=recompute, cluster=NOMINAL_CPU, **options
    )
    optimizer = torch.optim.AdamW(run.parameters(), lr=1e-3)

    def step() -> float:
        optimizer.zero_grad()
        out = run(**batch)
        loss = out if isinstance(out, torch.Tensor) else out["loss"]
        loss.backward()
        return loss.item()

    loss, gradients = step(), run.full_gradients()
    optimizer.step()
    prediction = run.plan_file.prediction
    assert prediction is not None
    weights = {key: value.clone() for key, value in run.full_state_dict().items()}
    return loss, gradients, weights, prediction.peak_bytes[0], peak_live_bytes(run, optimizer, step)


def assert_same_bits(one: Found, other: Found) -> None:
    assert one[0] == other[0]
    for before, after in zip(one[1:3], other[1:3], strict=True):
        assert before.keys() == after.keys()
        for key, value in before.items():
            assert torch.equal(value, after[key]), key


# What is left of the activations by "selective", "full" and a budget.
LEFT = {
    "gpt2": (0.7, 0.5, 0.6),
    "chain": (1.0, 0.65, 0.6),
    "skips": (1.0, 0.85, 0.9),
}


@pytest.mark.parametrize("name", CASES)
def test_not_a_bit_changes_and_memory_is_as_predicted(name: str) -> None:
    none = train(name, "none")
    state = 3 * sum(value.numel() * 4 for value in none[2].values())
    for recompute, share in zip(("selective", "full", LEFT[name][2]), LEFT[name], strict=True):
        found = train(name, recompute)
        assert_same_bits(none, found)
        assert found[4] == pytest.approx(found[3], rel=0.02)
        assert found[4] - state <= 1.002 * share * (none[4] - state)


def test_a_budget_that_cannot_be_kept_is_refused() -> None:
    with pytest.raises(FitError, match=r"a rank needs .* at the least, and the budget that recom"):
        train("gpt2", "100 KiB")


LAYOUTS: list[dict[str, Any]] = [
    {"pp": 2, "micro_batches": 4, "schedule": "zb-h1"},
    {"tp": 2, "overlap": 2},
    {"dp": 2, "state_shards": "zero-3"},
]


def on_ranks() -> list[list[tuple[float, dict[str, torch.Tensor], int]]]:
    """By layout, of each kind of recomputation: loss, gradients, predicted peak."""
    found = []
    for options in LAYOUTS:
        own = []
        for recompute in ("none", "full"):
            model = parallel(
                lambda: Words(blocks=2, dropout=0.2), words(0), recompute=recompute, **options
            )
            loss = model(**part(words(0), model))["loss"]
            loss.backward()
            prediction = model.plan_file.prediction
            assert prediction is not None
            own.append((loss.item(), model.full_gradients(), max(prediction.peak_bytes)))
        found.append(own)
    return found


def test_not_a_bit_changes_on_two_ranks() -> None:
    found, other = run_ranks(2, on_ranks)
    for layout, own in enumerate(found):
        (loss, gradients, peak), (less_loss, less_gradients, less_peak) = own
        assert [x[0] for x in own] == [x[0] for x in other[layout]]
        assert less_loss == loss, LAYOUTS[layout]
        assert less_peak < peak, LAYOUTS[layout]
        for key, value in gradients.items():
            assert torch.equal(value, less_gradients[key]), (LAYOUTS[layout], key)
