"""Parameters that are given other memory go on training, or are refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
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


def trained(
    model: Model, start: dict[str, torch.Tensor], between: Callable[[Model, int], None] | None
) -> list[float]:
    model.load_state_dict(start)
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


@dataclass
class Found:
    """The losses of each way, and what is told of memory held twice and of another wrapper."""

    losses: dict[str, list[float]]
    held_twice: str
    wrapped: list[str]


def all_ways(options: dict[str, Any]) -> Found:
    torch.manual_seed(0)
    model, start = built(**options), Tied().state_dict()
    ways = {"none": None, "all": all_replaced, "one": one_replaced, "averaged": averaged}
    losses = {name: trained(model, start, way) for name, way in ways.items()}
    twice = held_twice(model) if options.get("state_shards") == "zero-0" else ""
    return Found(losses, twice, wrapped(model) if "tp" in options else [])


def held_twice(model: Model) -> str:
    first, second, *_ = model.parameters()
    alias = second.data
    first.data = first.data.clone()
    with pytest.raises(ConfigError) as told:
        loss_of(model)
    del alias
    loss_of(model)
    return str(told.value)


def wrapped(model: Model) -> list[str]:
    said = []
    for module in (model, nn.Sequential(model)):
        with pytest.raises(ConfigError) as told:
            nn.parallel.DistributedDataParallel(module)
        said.append(str(told.value))
    assert nn.parallel.DistributedDataParallel(nn.Linear(2, 2)).module is not None
    return said


@pytest.mark.parametrize(
    "options",
    [{"dp": 2, "state_shards": "zero-0"}, {"dp": 2, "state_shards": "zero-3"}, {"tp": 2}],
    ids=str,
)
def test_training_goes_on(options: dict[str, Any]) -> None:
    """But where something else holds the memory, or other parallelism is put around the model."""
    for found in run_ranks(2, partial(all_ways, options)):
        usual = found.losses["none"]
        assert usual[0] > usual[2]
        assert all(losses == usual for losses in found.losses.values())
        if options.get("state_shards") == "zero-0":
            assert "was given other memory by .data =" in found.held_twice
            assert "p.data.copy_(values)" in found.held_twice
        around = "DistributedDataParallel is put around a model that auto_parallel runs"
        assert [around in text for text in found.wrapped] == [True] * 2 * ("tp" in options)


def shared(options: dict[str, Any]) -> tuple[float, float, str]:
    """Losses of a model and of a copy on its memory, and what is said once one is trained."""
    model = built(**options)
    other = copy.deepcopy(model)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        p.data.mul_(0.5)
        q.data = p.data
    losses = loss_of(model), loss_of(other)
    assert loss_of(other) == losses[1]
    trained(model, Tied().state_dict(), None)
    with pytest.raises(ConfigError) as told:
        loss_of(other)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        q.data = p.data.clone()
    assert loss_of(other) == loss_of(model)
    return *losses, str(told.value)


@pytest.mark.parametrize("shards", ["zero-0", "zero-3"])
def test_memory_of_two_models_is_written_to_by_none(shards: str) -> None:
    for one, other, said in run_ranks(2, shared, {"dp": 2, "state_shards": shards}):
        assert one == other
        assert "was given the memory of another parameter by .data =" in said
        assert "p.data.copy_(values)" in said


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


def test_torch_compile_leaves_a_compiled_step_as_it_is() -> None:
    model = built()
    expected = loss_of(model)
    assert float(torch.compile(model, backend="eager")(batch(0, 1))["loss"].detach()) == expected


def stepped(model: Any, *, parts: tuple[int, int] = (0, 1)) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        model(batch(*parts))["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()


def alone() -> dict[str, torch.Tensor]:
    """Tensors that parameters were given, once these are trained: in one process they are one."""
    model, given = Tied(), {n: t.clone() * 0.5 for n, t in Tied().named_parameters()}
    for name, p in model.named_parameters():
        p.data = given[name]
    stepped(model)
    return given


Followed = tuple[dict[str, torch.Tensor], list[str]]


def followed(options: dict[str, Any]) -> Followed:
    """The same on ranks, and what is said where tensors cannot follow."""
    torch.manual_seed(0)
    model = built(**options)
    model.load_state_dict(Tied().state_dict())
    given = {n: t.clone() * 0.5 for n, t in Tied().named_parameters()}
    for name, p in model.named_parameters():
        p.data = given[name]
    said, parts = list[str](), (model.data_parallel_rank, model.data_parallel_size)
    try:
        stepped(model, parts=parts)
    except ConfigError as error:
        said.append(str(error))
    else:
        flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
        start = 0
        for p in model.parameters():
            p.data, start = flat[start : start + p.numel()].view(p.shape), start + p.numel()
        with pytest.raises(ConfigError) as told:
            stepped(model, parts=parts)
        said.append(str(told.value))
        for p in model.parameters():
            p.data = p.detach().clone()
    return given, said


def test_tensors_that_parameters_were_given_follow_them() -> None:
    """Those of their own; parts of larger tensors do not, and that is said."""
    torch.manual_seed(0)
    plain = alone()
    found: list[Followed] = run_ranks(2, followed, {"dp": 2, "state_shards": "zero-0"})
    for given, said in found:
        for name, tensor in given.items():
            torch.testing.assert_close(tensor, plain[name], rtol=1e-10, atol=1e-12)
        assert "as a part of a larger tensor" in said[0]


@pytest.mark.parametrize("options", [{"tp": 2}, {"dp": 2, "state_shards": "zero-3"}], ids=str)
def test_whole_tensors_that_parameters_were_given_cannot_follow(options: dict[str, Any]) -> None:
    for _, said in run_ranks(2, followed, options):
        assert "was given a whole tensor by .data =" in said[0]
        assert "p.data = values.clone()" in said[0]
