"""What is saved of a model and its optimizers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from merakc.errors import CheckpointError
from merakc.train.checkpoints.run_state import (
    joined_records,
    optimizer_tensors,
    parallel_state,
    resume,
    weights_of,
)
from tests.train.checkpoints.small_runs import trained
from tests.train.outside.small import X, normed


def test_tied_weights_are_saved_once() -> None:
    model, optimizer = trained(1)
    names = weights_of(model).keys()
    assert "model/embedding.weight" in names
    assert "model/head.weight" not in names
    tensors, records = optimizer_tensors(model, [optimizer])
    assert "optimizer/state.embedding.weight.exp_avg" in tensors
    assert records[0]["groups"][0]["options"]["lr"] == 0.01
    assert len(records[0]["groups"][0]["names"]) == len(list(model.parameters()))


class Counting(nn.Linear):
    def get_extra_state(self) -> int:
        return 3

    def set_extra_state(self, state: int) -> None:
        raise NotImplementedError


@pytest.mark.parametrize("value", [3, torch.ones(2)])
def test_state_that_is_no_parameter_or_buffer_is_refused(value: Any) -> None:
    model = Counting(2, 2)
    model.get_extra_state = lambda: value  # type: ignore[method-assign]
    with pytest.raises(CheckpointError, match="'_extra_state' of the model's state_dict"):
        weights_of(model)


def test_one_parameter_of_two_optimizers_is_refused() -> None:
    model, optimizer = trained(1)
    other = torch.optim.AdamW(model.parameters(), lr=0.5)
    optimizer_tensors(model, [optimizer, other])  # which has no state yet
    other.load_state_dict(optimizer.state_dict())
    with pytest.raises(CheckpointError, match=r"two optimizers hold 'embedding.weight'"):
        optimizer_tensors(model, [optimizer, other])


def test_learning_rates_may_be_tensors() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.5))
    _, records = optimizer_tensors(model, [optimizer])
    assert records[0]["groups"][0]["options"]["lr"] == 0.5


def test_records_of_ranks_are_joined_by_group() -> None:
    def record(names: list[str], lr: float = 0.1) -> list[dict[str, object]]:
        groups = [{"options": {"lr": lr}, "names": names}]
        return [{"kind": "Adam", "groups": groups, "scalars": {}}]

    found = joined_records([record(["a", "b"]), record(["b", "c"])])
    assert found[0]["groups"][0]["names"] == ["a", "b", "c"]
    with pytest.raises(CheckpointError, match="rank 1 gives 0 optimizers, and rank 0 1"):
        joined_records([record(["a"]), []])
    with pytest.raises(CheckpointError, match=r"lr is 0.2 for 0.1"):
        joined_records([record(["a"]), record(["b"], 0.2)])


@pytest.mark.parametrize("how", ["of none", "numbers", "dots", "added"])
def test_state_of_an_optimizer_that_would_be_lost_is_refused(how: str) -> None:
    model, optimizer = trained(1)
    own = optimizer.state[next(model.parameters())]
    if how == "of none":
        optimizer.state["k"] = torch.ones(1)  # type: ignore[index]
    elif how == "added":
        optimizer.register_state_dict_post_hook(lambda _, found: found | {"k": 3})
    else:
        own[0 if how == "numbers" else "a.b"] = torch.ones(1)
    with pytest.raises(CheckpointError, match=r"AdamW has .*: only state of its parameters"):
        optimizer_tensors(model, [optimizer])


@pytest.mark.filterwarnings("ignore:the forward of Normed returns no loss")
def test_a_run_goes_on_drawing_where_it_was() -> None:
    model, other = normed(dropout=0.5), normed(dropout=0.5)
    model(X).sum().backward()
    with torch.no_grad():
        model(X)  # which draws as well
    saved = parallel_state(model)
    assert (saved["step"], saved["drawn"]) == (1, 2)
    resume(other, saved)
    assert other(X).sum().item() == model(X).sum().item()
    resume(other, {"step": 5, "seed": 0})  # of a version that counted steps alone
    assert other._own("_steps").drawn == 5
