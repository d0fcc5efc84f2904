"""Parameters that are given other memory go on training, or are refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any

import pytest
import torch
from torch import nn

import merakc
from benchmarks.ranks import run_ranks
from merakc.errors import ConfigError
from merakc.machines.cluster import NOMINAL_CPU
from tests.train.parameters.test_norms import Tied, batch

Model = merakc.ParallelModel


def built(dp: int = 1, **options: Any) -> Model:
    return merakc.auto_parallel(Tied(), batch(0, dp), cluster=NOMINAL_CPU, dp=dp, **options)


def loss_of(model: Any) -> float:
    parts = (model.data_parallel_rank, model.data_parallel_size)
    return float(model(batch(*parts))["loss"].detach())


def all_replaced(model: Model, step: int) -> None:
    for p in model.parameters():
        p.data = p.data.clone()


def one_replaced(model: Model, step: int) -> None:
    p = next(iter(model.parameters()))
    p.data = p.data + 0.0


def averaged(model: Model, step: int) -> None:
    """Evaluates with other weights, and takes the old ones back."""
    backup = [p.data for p in model.parameters()]
    for p in model.parameters():
        p.data = p.data * 0.5
    with torch.no_grad():
        halved = loss_of(model)
    for p, old in zip(model.parameters(), backup, strict=True):
        p.data = old
    assert halved != loss_of(model)


def trained(options: dict[str, Any], between: Callable[[Model, int], None] | None) -> list[float]:
    torch.manual_seed(0)
    model = built(**options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found = []
    for step in range(3):
        loss = model(batch(model.data_parallel_rank, model.data_parallel_size))["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if between is not None:
            between(model, step)
        found.append(float(loss.detach()))
    return found


def all_ways(options: dict[str, Any]) -> dict[str, list[float]]:
    ways = {"none": None, "all": all_replaced, "one": one_replaced, "averaged": averaged}
    return {name: trained(options, way) for name, way in ways.items()}


@pytest.mark.parametrize(
    "options",
    [{"dp": 2, "state_shards": "zero-0"}, {"dp": 2, "state_shards": "zero-3"}, {"tp": 2}],
    ids=str,
)
def test_training_goes_on(options: dict[str, Any]) -> None:
    for found in run_ranks(2, partial(all_ways, options)):
        assert found["none"][0] > found["none"][2]
        assert all(losses == found["none"] for losses in found.values())


def held_twice() -> str:
    model = built(dp=2, state_shards="zero-0")
    first, second, *_ = model.parameters()
    alias = second.data
    first.data = first.data.clone()
    with pytest.raises(ConfigError) as told:
        loss_of(model)
    del alias
    loss_of(model)
    return str(told.value)


def test_memory_that_something_else_holds() -> None:
    for text in run_ranks(2, held_twice):
        assert "was given other memory by .data =" in text
        assert "p.data.copy_(values)" in text


REFUSED: dict[str, tuple[Callable[[Model], object], str]] = {
    "half": (lambda m: loss_of(m.half()), "'a.weight' is torch.float16"),
    "replaced": (
        lambda m: (m.get_submodule("a")._parameters.update(weight=nn.Parameter(torch.ones(6, 6))),
                   loss_of(m)),
        "'a.weight' is another tensor"),
    "moved modules": (
        lambda m: (m._modules.update({"a": m._modules.pop("a")}), loss_of(m)),
        "module 'a' was added to the model, taken out of it, or moved"),
    "other modules": (
        lambda m: (setattr(m, "_modules", dict(reversed(m._modules.items()))), loss_of(m)),
        "module 'a' was added to the model, taken out of it, or moved"),
    "a new parameter": (
        lambda m: m.register_parameter("x", nn.Parameter(torch.ones(2))), "'x' is set to a"),
    "a new module": (lambda m: m.add_module("x", nn.Linear(1, 1)), "'x' is set to a Linear"),
    "a copied part": (lambda m: copy.deepcopy(m.get_submodule("a")), "copies the whole model"),
    "a shallow copy": (copy.copy, "cannot be pickled .* or shallowly copied"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    call, text = REFUSED[name]
    with pytest.raises(ConfigError, match=text.replace("'", "['\"]")):
        call(built())


def wrapped() -> list[str]:
    model, said = built(tp=2), []
    for module in (model, nn.Sequential(model)):
        with pytest.raises(ConfigError) as told:
            nn.parallel.DistributedDataParallel(module)
        said.append(str(told.value))
    assert nn.parallel.DistributedDataParallel(nn.Linear(2, 2)).module is not None
    return said


def test_other_parallelism_around_it() -> None:
    for text in chain.from_iterable(run_ranks(2, wrapped)):
        assert "DistributedDataParallel is put around a model that auto_parallel runs" in text


def test_torch_compile_leaves_a_compiled_step_as_it_is() -> None:
    model = built()
    expected = loss_of(model)
    assert float(torch.compile(model, backend="eager")(batch(0, 1))["loss"].detach()) == expected
