"""Modules of a parallel model that are called by themselves, in evaluation."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache

import merakc
from benchmarks.ranks import run_ranks
from merakc.errors import ConfigError, PlanError, RecordError
from merakc.machines.cluster import NOMINAL_CPU
from merakc.train.outside.parts import Unshared, Within
from tests.battery.small_models import build

WIDTH = 4
BATCH = torch.linspace(-1, 1, 8 * WIDTH).double().view(8, WIDTH)


class Two(nn.Module):
    """A tower, whose mean over the batch couples samples, and what is made of it."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH),
            nn.BatchNorm1d(WIDTH),
        )  # fmt: skip
        self.mean = Mean()
        self.head = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, 1))

    def forward(self, x: torch.Tensor | None = None, towered: Any = None) -> torch.Tensor:
        """A loss."""
        towered = self.tower(x) if towered is None else towered
        return self.head(towered - self.mean(towered)["mean"]).square().mean()


class Mean(nn.Module):
    """One number for all samples, and what is called a loss."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """Both."""
        return {"mean": x.mean(0), "loss": x.sum()}


def parallel(**layout: int) -> Any:
    given: dict[str, Any] = {"micro_batches": 2, "cluster": NOMINAL_CPU, **layout}
    return merakc.auto_parallel(build(Two), {"x": BATCH}, **given)


def evaluated(model: Any) -> list[torch.Tensor]:
    """What parts of it give."""
    model.eval()
    own = BATCH[:3]
    towered = model.tower(own)
    found = [towered, model.head(towered), *model.mean(towered).values()]
    with torch.no_grad():
        found.append(model(towered=towered.detach()))
        model.train()
        found.append(model.tower(own[:3]))  # which counts in running means
    return [x.detach() for x in [*found, *model.eval().tower(BATCH[:3])]]


def on_ranks(layout: dict[str, int]) -> list[torch.Tensor]:
    model: Any = parallel(**layout)
    found = evaluated(model)
    return found


@pytest.mark.parametrize("layout", [{}, {"tp": 2}, {"pp": 2}])
def test_parts_are_evaluated_by_themselves(layout: dict[str, int]) -> None:
    for found in run_ranks(2, on_ranks, layout) if layout else [on_ranks(layout)]:
        for ours, plain in zip(found, evaluated(build(Two)), strict=True):
            torch.testing.assert_close(ours, plain, rtol=1e-10, atol=1e-12)


def of_split() -> dict[str, str | torch.Tensor]:
    """What layers give of which tp splits some, or why none."""
    model, found = parallel(tp=2).eval(), dict[str, str | torch.Tensor]()
    for name, width in LAYERS.items():
        try:
            found[name] = model.get_submodule(name)(BATCH.view(-1, width)).detach()
        except PlanError as error:
            found[name] = str(error)
    return found


LAYERS = {"tower.0": WIDTH, "tower.2": 2 * WIDTH, "head.0": WIDTH, "head.1": 2 * WIDTH}


def test_layers_that_tp_splits_are_right_or_refused() -> None:
    plain: Any = build(Two).eval()
    for found in run_ranks(2, of_split):
        assert any(isinstance(ours, str) for ours in found.values())
        for name, ours in found.items():
            if isinstance(ours, str):
                assert "splits a dim that this graph needs whole" in ours
            else:
                wanted = plain.get_submodule(name)(BATCH.view(-1, LAYERS[name]))
                torch.testing.assert_close(ours, wanted.detach(), rtol=1e-10, atol=1e-12)


def alone(whole: bool) -> tuple[int, list[torch.Tensor]]:
    """Ranks of dp whose batches are no parts of one; the whole job's."""
    model: Any = parallel(dp=2)
    model.eval().read_whole_batches(whole)
    rank = 0 if whole else model.rank
    own = BATCH[: 3 + 2 * rank]
    return rank, [x.detach() for x in (model.tower(own), *model.mean(model.tower(own)).values())]


@pytest.mark.parametrize("whole", [False, True])
def test_of_what_a_rank_gives_alone(whole: bool) -> None:
    plain: Any = build(Two).eval()
    for rank, found in run_ranks(2, alone, whole):
        own = plain.tower(BATCH[: 3 + 2 * rank])
        for ours, wanted in zip(found, (own, *plain.mean(own).values()), strict=True):
            torch.testing.assert_close(ours, wanted, rtol=1e-10, atol=1e-12)


def test_they_are_not_trained_by_themselves() -> None:
    model: Any = parallel()
    with pytest.raises(ConfigError, match="Sequential is called by itself, outside the model's"):
        model.tower(BATCH)
    towered = model.eval().tower(BATCH)
    with pytest.raises(ConfigError, match=r"backward\(\) of what a call in evaluation mode gives"):
        model.head(towered).sum().backward()
    with pytest.raises(RecordError, match="'towered' of the batch requires a gradient"):
        model.train()(towered=towered)
    tower = model.eval().tower
    with torch.no_grad():
        assert not tower(BATCH).requires_grad
    del model, towered
    gc.collect()
    with pytest.raises(ConfigError, match="keep the model"):
        tower(BATCH)


class Decoder(nn.Module):
    """Adds keys and values to a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, past_key_values: Any = None) -> torch.Tensor:
        """The mean of all that were."""
        keys = self.layer(x)[:, None]
        if past_key_values is not None:
            keys, _ = past_key_values.update(keys, keys, 0)
        return keys.mean(-2)


class Decodes(nn.Module):
    """A model with it."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = Decoder()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A loss."""
        return self.decoder(x).square().mean()


def test_a_part_adds_to_a_cache() -> None:
    from tests.train.outside.test_caches import gpt2

    texts = BATCH.view(2, 4, WIDTH)
    model: Any = merakc.auto_parallel(build(Decodes), {"x": texts}, cluster=NOMINAL_CPU)
    config = build(gpt2).config
    found = []
    for each in (model.eval(), build(Decodes)):
        cache = DynamicCache(config=config)
        with torch.no_grad():
            found.append([each.decoder(x, past_key_values=cache) for x in texts.split(2, 1)])
        assert int(cache.get_seq_length()) == 4
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-12)


def test_names_are_those_of_the_model() -> None:
    model = build(Two)
    within = Within(model, model.get_submodule("tower.0"))
    assert within.path == "tower.0"
    shown = Unshared(within)
    assert [n for n, _ in shown.named_modules()] == [n for n, _ in model.named_modules()]
    assert shown(BATCH)["loss"] is None
    assert torch.equal(shown(BATCH)["outputs"], within(BATCH))
