"""State dicts say which parts they hold, and take whole tensors or the same parts."""

from __future__ import annotations

import io
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import merakc
from benchmarks.ranks import RankError, run_ranks
from merakc.errors import ConfigError
from merakc.machines.cluster import NOMINAL_CPU
from merakc.runtime.part import TensorPart
from tests.battery.small_models import Words, build, parallel, part, warm_up, words


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    warm_up()


LAYOUTS = [{"tp": 2}, {"pp": 2}, {"dp": 2, "state_shards": "zero-3"}]


def whole_and_back(layout: dict[str, Any], path: Path) -> None:
    """And, on tp, own files; then all load the part of rank 0, which is the last thing they do."""
    model = parallel(partial(Words), words(0), **layout)
    wanted = build(partial(Words), seed=7).state_dict()
    found = model.load_state_dict(wanted)
    assert not found.missing_keys
    assert not found.unexpected_keys
    full = model.full_state_dict()
    for name, value in full.items():
        assert torch.equal(value, wanted[name]), name
    own = model.state_dict()
    assert all(tuple(value.shape) == tuple(wanted[n].shape) for n, value in own.items())
    with pytest.raises(
        ConfigError, match=r"'norm.weight' is given as \(3,\), and the whole is \(8,\)"
    ):
        model.load_state_dict({**wanted, "norm.weight": torch.zeros(3)})
    with pytest.raises(ConfigError, match="assign=True"):
        model.load_state_dict(wanted, assign=True)
    for name, value in model.full_state_dict().items():
        assert torch.equal(value, wanted[name]), name
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):  # state that is loaded before a step says what it is, too
        model(**part(words(0), model))["loss"].backward()
        optimizer.step()
        other = torch.optim.AdamW(model.parameters(), lr=0.1)
        other.load_state_dict(optimizer.state_dict())
        optimizer = other
    state = optimizer.state_dict()["state"]
    parts = [v for s in state.values() for v in s.values() if isinstance(v, TensorPart)]
    assert bool(parts) == any(isinstance(v, TensorPart) for v in own.values())
    if "tp" in layout:
        own_files(model)
        rank_0_saves_for_all(model, path)


def own_files(model: merakc.ParallelModel) -> None:
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    file.seek(0)
    model.load_state_dict(torch.load(file))
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


def rank_0_saves_for_all(model: merakc.ParallelModel, path: Path) -> None:
    if model.rank == 0:
        torch.save(model.state_dict(), path)
    torch.distributed.barrier()
    model.load_state_dict(torch.load(path))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_whole_tensors_and_own_parts_are_taken(layout: dict[str, Any], tmp_path: Path) -> None:
    """Each rank may keep a file of its own; the part of rank 0 is loaded by no other."""
    refused = pytest.raises(RankError, match="saved by another rank or under another plan")
    with refused if "tp" in layout else nullcontext():
        run_ranks(2, partial(whole_and_back, layout, tmp_path / "rank0.pt"))


def test_state_dicts_need_no_gradient() -> None:
    model = parallel(partial(Words), words(0))
    assert not any(v.requires_grad for v in model.state_dict().values())
    assert any(v.requires_grad for v in model.state_dict(keep_vars=True).values())


class Normed(nn.Module):
    """Channels and their statistics, which tp splits."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 3, 2), nn.Flatten()
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A loss."""
        return self.layers(x).square().mean()


def after_a_step(folder: Path) -> None:
    """Running statistics are split over tp, and written since dp ranks shared them."""
    given = {"x": torch.randn(4, 3, 4, 4, generator=torch.Generator().manual_seed(0)).double()}
    model = merakc.auto_parallel(
        build(Normed), given, dp=2, tp=2, micro_batches=2, cluster=NOMINAL_CPU
    )
    model(**given).backward()
    parts = [v for v in model.state_dict().values() if isinstance(v, TensorPart)]
    assert any(v.place.name.endswith("running_mean") for v in parts)
    assert not any(isinstance(v.local, TensorPart) for v in parts)
    merakc.save(folder, model)
    merakc.load(folder, model)


def test_buffers_that_a_step_has_written_are_loaded(tmp_path: Path) -> None:
    run_ranks(4, after_a_step, tmp_path / "saved")


class Two(nn.Module):
    """A layer for each of two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x).tanh()).square().mean()


def missing() -> tuple[list[str], list[str], str]:
    model = merakc.auto_parallel(Two(), torch.ones(2, 4), pp=2, cluster=NOMINAL_CPU)
    some = {n: t for n, t in Two().state_dict().items() if "bias" not in n}
    own = model.load_state_dict(model.state_dict())
    keys = model.load_state_dict({**some, "more": torch.ones(1)}, strict=False)
    with pytest.raises(RuntimeError) as told:
        model.load_state_dict(some)
    return [*own.missing_keys], [*keys.missing_keys, *keys.unexpected_keys], str(told.value)


def test_every_rank_is_told_which_weights_are_missing() -> None:
    for own, others, said in run_ranks(2, missing):
        assert own == []
        assert others == ["first.bias", "last.bias", "more"]
        assert "Missing key(s) in state_dict: first.bias, last.bias." in said
