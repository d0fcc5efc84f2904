"""An optimizer gets the state that it had, or none."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import merakc
from benchmarks.ranks import run_ranks
from merakc.errors import CheckpointError
from merakc.machines.cluster import NOMINAL_CPU
from merakc.runtime.part import plain
from merakc.train.checkpoints.manifest import read_manifest
from merakc.train.checkpoints.optimizer_state import states_for
from tests.train.checkpoints.small_runs import trained


def tensor_rates(model: nn.Module) -> torch.optim.Optimizer:
    betas = torch.tensor(0.9), torch.tensor(0.99)
    return torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.3), betas=betas, foreach=False)


def test_options_that_are_tensors_stay_so(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = tensor_rates(model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    scheduler.step()
    merakc.save(tmp_path / "c", model, optimizer, scheduler)
    other = tensor_rates(model)
    after = torch.optim.lr_scheduler.ExponentialLR(other, 0.7)
    merakc.load(tmp_path / "c", model, other, after)
    scheduler.step()
    after.step()
    (one,), (two,) = optimizer.param_groups, other.param_groups
    assert isinstance(two["lr"], torch.Tensor)
    assert (one["lr"], one["betas"]) == (two["lr"], two["betas"])


def test_parameters_that_were_saved_are_given(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.AdamW(model[0].parameters())
    optimizer.add_param_group({"params": model[1].parameters()})
    merakc.save(tmp_path / "c", model, optimizer)
    with pytest.raises(CheckpointError, match=r"the saved AdamW has '1.weight', which is in none"):
        merakc.load(tmp_path / "c", model, torch.optim.AdamW(model[0].parameters()))
    merakc.load(tmp_path / "c", model, torch.optim.AdamW(model.parameters()))


def made_anew(folder: Path) -> list[str]:
    """The tensors of state that a load would make memory for, on a rank that has all of its own."""
    model, optimizer = trained(1, tp=2)
    merakc.save(folder, model, optimizer)
    _, found = states_for(model, [optimizer], read_manifest(folder))
    own = {plain(t).data_ptr() for state in optimizer.state.values() for t in state.values()}
    return [
        name for name, t in found.items() if plain(getattr(t, "local", t)).data_ptr() not in own
    ]


def test_state_is_read_into_the_memory_that_it_has(tmp_path: Path) -> None:
    assert run_ranks(2, partial(made_anew, tmp_path / "c")) == [[], []]


class Tempered(nn.Module):
    """With a parameter that is a single number, as CLIP's."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(6, 8), nn.Parameter(torch.tensor(1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A mean square."""
        return (self.layer(x) * self.scale).square().mean()


def tempered(folder: Path, how: str) -> list[float]:
    """Losses of steps, after two of which the state is brought to another model in one way."""

    def made() -> tuple[Any, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = merakc.auto_parallel(
            Tempered().double(), x, dp=2, state_shards="zero-1", cluster=NOMINAL_CPU
        )
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)).double()
    model, optimizer = made()
    losses = []
    for step in range(4):
        if step == 2 and how != "none":
            others = made()
            if how == "file":
                merakc.save(folder, model, optimizer)
                merakc.load(folder, *others)
            else:
                others[0].load_state_dict(model.state_dict())
                others[1].load_state_dict(optimizer.state_dict())
            model, optimizer = others
        loss = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_state_of_single_numbers_is_loaded_where_ranks_hold_none_of_them(tmp_path: Path) -> None:
    wanted = run_ranks(2, tempered, tmp_path, "none")
    for how in ("file", "state dicts"):
        assert run_ranks(2, tempered, tmp_path / how, how) == wanted
