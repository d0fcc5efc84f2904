"""An optimizer gets the state that it had, or none."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import merakc
from benchmarks.ranks import run_ranks
from merakc.errors import CheckpointError
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
