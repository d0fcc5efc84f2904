"""Numbers of gradients, made as people make them, are those of one process on every plan."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import merakc
from benchmarks.ranks import run_ranks
from merakc.errors import ConfigError, MerakError
from merakc.machines.cluster import NOMINAL_CPU
from merakc.runtime.part import TensorPart, plain
from merakc.train.parameters.elements import Elements
from tests.train.parameters.test_norms import Tied, batch

LAYOUTS: dict[str, dict[str, Any]] = {
    "dp 2, zero-1": {"dp": 2, "state_shards": "zero-1"},
    "dp 2, zero-3": {"dp": 2, "state_shards": "zero-3"},
    "tp 2 x pp 2": {"tp": 2, "pp": 2},
}
Parameters = Iterable[nn.Parameter]


def graded(parameters: Parameters) -> list[torch.Tensor]:
    return [p.grad for p in parameters if p.grad is not None]


def by_item(parameters: Parameters) -> float:
    total = 0.0
    for p in parameters:
        if p.grad is not None:
            total += p.grad.detach().data.norm(2).item() ** 2
    return total**0.5


def by_stack(parameters: Parameters) -> float:
    return float(torch.norm(torch.stack([torch.norm(g.detach(), 2) for g in graded(parameters)])))


def by_sum(parameters: Parameters) -> float:
    return float(sum((g**2).sum() for g in graded(parameters)) ** 0.5)  # type: ignore[operator]


def by_largest(parameters: Parameters) -> float:
    return max(float(g.abs().max()) for g in graded(parameters))


def by_foreach(parameters: Parameters) -> float:
    return float(torch.nn.utils.get_total_norm(graded(parameters), foreach=True))


NUMBERS: dict[str, Callable[[Parameters], float]] = {
    "item": by_item,
    "stack": by_stack,
    "sum": by_sum,
    "largest": by_largest,
    "foreach": by_foreach,
    "inf": lambda ps: float(torch.nn.utils.get_total_norm(graded(ps), float("inf"))),
    "1": lambda ps: float(torch.nn.utils.get_total_norm(graded(ps), 1.0)),
    "mean": lambda ps: float(sum(g.mean() for g in graded(ps))),
    "scaled": lambda ps: sum(float((0.5 * g / 3).norm()) for g in graded(ps)),
    "finite": lambda ps: float(all(bool(torch.isfinite(g).all()) for g in graded(ps))),
    "not a number": lambda ps: float(sum(g.isnan().any() for g in graded(ps))),
    "above": lambda ps: float(sum((g > 0).any() + g.sign().int().max() for g in graded(ps))),
    "zeros": lambda ps: float(sum(torch.count_nonzero(g) for g in graded(ps))),
    "some": lambda ps: float(torch.nn.utils.get_total_norm([p.grad for p in [*ps][:2]])),  # type: ignore[misc]
}


def numbers(options: dict[str, Any] | None) -> tuple[dict[str, float], float, dict[str, Any]]:
    """What is made of the gradients; then the norm and the weights of clipped steps."""
    torch.manual_seed(0)
    model: Any = Tied()
    if options is not None:
        dp = options.get("dp", 1)
        model = merakc.auto_parallel(
            model, batch(0, dp), micro_batches=2, cluster=NOMINAL_CPU, **options
        )
    own = (model.data_parallel_rank, model.data_parallel_size) if options is not None else (0, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    found: dict[str, float] = {}
    norm = 0.0
    for step in range(2):
        model(batch(*own))["loss"].backward()
        if step == 0:
            parameters = list(model.parameters())
            found = {name: number(parameters) for name, number in NUMBERS.items()}
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01))
        optimizer.step()
        optimizer.zero_grad()
    weights = model.full_state_dict() if options is not None else model.state_dict()
    return found, norm, {n: w.detach() for n, w in weights.items()}


@pytest.mark.parametrize("name", LAYOUTS)
def test_numbers(name: str) -> None:
    options = LAYOUTS[name]
    wanted, norm, weights = numbers(None)
    world = options.get("dp", 1) * options.get("tp", 1) * options.get("pp", 1)
    everyone = run_ranks(world, partial(numbers, options))
    for found, own_norm, _ in everyone:
        assert found == pytest.approx(wanted, rel=1e-10, abs=1e-14)
        assert own_norm == pytest.approx(norm, rel=1e-10)
    for key, value in everyone[0][2].items():
        torch.testing.assert_close(value, weights[key], rtol=1e-10, atol=1e-12)


@dataclass
class Told:
    """What a rank finds out about the parts that it has."""

    outside: tuple[type, type, str, str]
    types: set[type]
    refused: str
    is_whole: bool
    norms: list[float]
    buffer: tuple[int, float, list[str]]


def parts() -> Told:
    model = merakc.auto_parallel(Tied(), batch(0, 1), tp=2, cluster=NOMINAL_CPU)
    model(batch(0, 1))["loss"].backward()
    return Told(outside(model), *kinds(model), with_nan(model), buffers())


def kinds(model: merakc.ParallelModel) -> tuple[set[type], str, bool]:
    """The types of gradients, and what is said of a sum over some dims."""
    gradient = model.get_parameter("a.weight").grad
    seen: list[type] = []

    class Looks(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            del closure
            seen.append(type(self.param_groups[0]["params"][0].grad * 2))
            raise ValueError

    merakc.declare_elementwise(Looks)  # it cannot be tried
    with pytest.raises(ValueError):  # noqa: PT011
        Looks(model.parameters()).step()
    again = (gradient * 2).norm()
    whole = 2 * gradient.norm()
    with pytest.raises(ConfigError) as told:
        gradient.sum(0)
    for call in (torch.sort, torch.std_mean, torch.std, lambda g: g.flatten().topk(2)):
        with pytest.raises(ConfigError, match="is called on"):
            call(gradient)
    return {type(gradient), *seen}, str(told.value), bool(torch.equal(again, whole))


def with_nan(model: merakc.ParallelModel) -> list[float]:
    """Norms of which one rank alone has something that is no number."""
    if model.rank == 1:
        plain(model.get_parameter("a.weight").grad).fill_(float("nan"))
    gradients = graded(model.parameters())
    return [float(torch.nn.utils.get_total_norm(gradients, kind)) for kind in (2.0, float("inf"))]


def outside(model: merakc.ParallelModel) -> tuple[type, type, str, str]:
    """What a part is where it leaves the process, and how it is shown."""
    part = model.get_parameter("a.weight")
    with pytest.raises(ConfigError, match=r"torch\.pickle is called on 'a\.weight'"):
        pickle.dumps(part.T)
    copies = [pickle.loads(pickle.dumps(x)) for x in (part, part.grad)]
    assert all(c.shape == part.shape and c.place.name == "a.weight" for c in copies)
    with torch.no_grad():
        part.zero_()
    model.load_state_dict({**model.state_dict(), "a.weight": copies[0]})
    assert torch.equal(plain(part), copies[0].to_local())
    return type(copies[0]), type(copies[1]), repr(part), f"{part.grad}"


class Scaled(nn.Module):
    """A buffer that tp splits."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 6)
        self.register_buffer("scale", torch.linspace(0.5, 2, 8))
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A loss."""
        return self.b(torch.tanh(self.a(x) * self.scale)).square().mean()


def buffers() -> tuple[int, float, list[str]]:
    """The elements of the buffer that this rank has, its numbers, and what is refused."""
    torch.manual_seed(0)
    model = merakc.auto_parallel(Scaled(), batch(0, 1), tp=2, cluster=NOMINAL_CPU)
    scale, told = model.get_buffer("scale"), []
    for act in (lambda: scale[0], lambda: scale.tolist(), lambda: scale.copy_(torch.ones(8))):
        with pytest.raises(ConfigError) as refused:
            act()
        told.append(str(refused.value))
    before = model(batch(0, 1)).item()
    scale.mul_(2)
    model.load_state_dict(model.state_dict())
    assert model(batch(0, 1)).item() != before
    model.scale *= 0.5
    assert model(batch(0, 1)).item() == before
    model.scale.data = torch.linspace(1, 4, 8).double()
    assert model(batch(0, 1)).item() != before
    model.scale.data = torch.linspace(0.5, 2, 8).double()
    assert model(batch(0, 1)).item() == before
    return plain(scale).numel(), float(scale.norm() + scale.max()), told


class Marked(nn.Module):
    """Buffers on every stage: of norms, single numbers, one that several stages read."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)) for _ in range(4)
        )
        for k, block in enumerate(self.blocks):
            block.register_buffer("mark", torch.tensor(k + 1.0))
        self.register_buffer("scale", torch.linspace(0.5, 2, 6))
        self.register_buffer("loose", torch.full((3,), -9.0), persistent=False)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A loss."""
        for block in self.blocks:
            x = x + torch.tanh(block(x * self.scale)) * block.mark
        return x.square().mean()


def of_buffers(model: nn.Module) -> list[float]:
    """What users ask of all buffers, and of some."""
    every, norms = [*model.buffers()], [block[1] for block in model.blocks]  # type: ignore[index,union-attr]
    return [
        len(every), sum(b.numel() for b in every), float(sum(b.double().sum() for b in every)),
        max(float(b.abs().max()) for b in every), *(float(n.running_mean.norm()) for n in norms),
    ]  # fmt: skip


def on_stages(options: dict[str, Any]) -> tuple[list[float], list[float], float, list[float]]:
    torch.manual_seed(0)
    given = batch(0, 1)
    model = merakc.auto_parallel(Marked(), given, micro_batches=1, cluster=NOMINAL_CPU, **options)
    model(given).backward()
    first = of_buffers(model)
    with torch.no_grad():
        for block in model.blocks:
            block.mark.mul_(2)
    model.scale.data = torch.linspace(1, 3, 6).double()  # of which it has all, or nothing
    whole = model.full_state_dict()
    if model.rank == 0:
        assert whole["scale"].tolist() == torch.linspace(1, 3, 6).double().tolist()
    model.load_state_dict(model.state_dict())
    marks = [model.blocks[0].mark.item(), model.blocks[3].mark.item()]
    return first, of_buffers(model), model(given).item(), marks


def test_buffers_of_other_stages_are_counted() -> None:
    options = {"pp": 2, "tp": 2}
    torch.manual_seed(0)
    plain_model, given = Marked(), batch(0, 1)
    plain_model(given).backward()
    first = of_buffers(plain_model)
    for block in plain_model.blocks:
        block.mark.mul_(2)
    plain_model.scale.data = torch.linspace(1, 3, 6).double()
    wanted = [first, of_buffers(plain_model), plain_model(given).item(), [2.0, 8.0]]
    for found in run_ranks(2 * options["tp"], on_stages, options):
        for one, other in zip(found, wanted, strict=True):
            assert one == pytest.approx(other, rel=1e-12)


def test_parts_speak_for_the_whole_and_say_so_outside_the_process() -> None:
    """A step sees plain tensors, and an error in it leaves no trace."""
    wanted = Scaled().get_buffer("scale")
    for found in run_ranks(2, parts):
        parameter, gradient, shown, gradient_shown = found.outside
        assert parameter is gradient is TensorPart
        assert " elements of 'a.weight')" in shown
        assert " elements of 'a.weight')" in gradient_shown
        assert found.types == {Elements, torch.Tensor}
        called = "torch.sum is called on 'a.weight' or its gradient, of which this rank holds"
        assert called in found.refused
        assert found.is_whole
        assert all(value != value for value in found.norms), "a NaN of one rank is in every norm"
        held, number, told = found.buffer
        assert held == 4, "of 8: tp splits it"
        assert number == pytest.approx(float(wanted.norm() + wanted.max()), rel=1e-12)
        assert all("on 'scale' or its gradient, of which this rank holds 4" in t for t in told)


class Held(Tied):
    """It may hold a copy of its weights, from which it is to stay near."""

    near: dict[str, torch.Tensor] | None = None
    reads = False

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """The mean, and how far away it is."""
        loss = super().forward(x)["loss"]
        if self.reads and self.near is not None:
            far = (p - self.near[name] for name, p in self.named_parameters())
            loss = loss + sum(one.square().sum() for one in far)
        return {"loss": loss}


def keeping(degrees: dict[str, int] | None) -> tuple[list[float], str]:
    """The losses of steps between which the model gets a copy of its weights; then what is said
    where the forward reads it.
    """
    model: Any = Held()
    if degrees is not None:
        model = merakc.auto_parallel(
            model, batch(0, 1), dp=1, micro_batches=2, cluster=NOMINAL_CPU, **degrees
        )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        loss = model(batch(0, 1))["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        model.near = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.reads, said = True, ""
    try:
        model(batch(0, 1))
    except MerakError as error:
        said = str(error)
    return losses, said


@pytest.mark.parametrize("degrees", [{"tp": 2, "pp": 1}, {"tp": 1, "pp": 2}], ids=str)
def test_a_model_may_hold_parts_that_its_forward_does_not_read(degrees: dict[str, int]) -> None:
    wanted, _ = keeping(None)
    found = run_ranks(2, partial(keeping, degrees))
    for losses, said in found:
        assert losses == pytest.approx(wanted, rel=1e-10)
        assert said
    assert any("of which this rank holds" in said for _, said in found)


def clipped(options: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Gradients that are scaled to the norms of their parameters, of which some are pruned, with
    gradients switched on.
    """
    dp = options.get("dp", 1)
    given = {"cluster": NOMINAL_CPU, "dp": dp, **options}
    model = merakc.auto_parallel(Tied(), batch(0, dp), **given)
    for p in model.parameters():
        p.data.masked_fill_(p.data.abs() < 0.1, 0)
    model(batch(model.data_parallel_rank, dp))["loss"].backward()
    for p in model.parameters():
        if p.numel() and p.grad is not None:
            p.grad.mul_(p.norm() * 0.01 / p.grad.norm())
    return model.full_gradients()


@pytest.mark.parametrize("name", LAYOUTS)
def test_gradients_may_be_written_to_with_gradients_on(name: str) -> None:
    plain_model = Tied()
    for p in plain_model.parameters():
        p.data.masked_fill_(p.data.abs() < 0.1, 0)
    plain_model(batch(0, 1))["loss"].backward()
    wanted = {
        n: p.grad * p.norm() * 0.01 / p.grad.norm() for n, p in plain_model.named_parameters()
    }
    options = LAYOUTS[name]
    ranks = options.get("dp", 1) * options.get("tp", 1) * options.get("pp", 1)
    found, *_ = run_ranks(ranks, clipped, options)
    for key, value in wanted.items():
        torch.testing.assert_close(found[key], value.detach(), rtol=1e-12, atol=0.0)


class Tempered(nn.Module):
    """Parameters of one element, before and behind its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.tensor([-0.3]))
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
        self.double()

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """A mean of squares."""
        return {"loss": (self.layers(x * self.first) * self.last.exp()).square().mean()}


def of_one(options: dict[str, Any] | None) -> list[Any]:
    torch.manual_seed(0)
    model, x = Tempered(), torch.randn(8, 4, dtype=torch.float64)
    if options is not None:
        model = merakc.auto_parallel(
            model, {"x": x}, whole_batches=True, cluster=NOMINAL_CPU, **{"dp": 1, **options}
        )
    model(x)["loss"].backward()
    found: list[Any] = []
    for p in (model.first, model.last):
        found += [
            p.item(),
            float(p.detach()),
            p.tolist(),
            1.0 if p > 0 else 0.0,
            p.detach().exp().item(),
        ]
        assert p.grad is not None
        found += [p.grad.item(), int(p.detach() * 10)]
    return [*torch.utils._pytree.tree_leaves(found)]


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_parameter_of_one_element_is_read_on_every_rank(name: str) -> None:
    options, wanted = LAYOUTS[name], of_one(None)
    ranks = options.get("dp", 1) * options.get("tp", 1) * options.get("pp", 1)
    for found in run_ranks(ranks, of_one, options):
        assert found == pytest.approx(wanted, rel=1e-10)
