"""What is set on a parallel model reaches the modules that its steps are compiled from."""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import merakc
from merakc.errors import ConfigError
from merakc.machines.cluster import NOMINAL_CPU
from merakc.train.model import ParallelModel
from merakc.train.settings import Settings

WIDTH = 4


class Inner(nn.Module):
    """A layer with a factor, an object and a mode."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.factor, self.options = 2.0, SimpleNamespace(power=2)
        self.activation = torch.sin
        self.drop = nn.Dropout(0.5)

    def scaled(self) -> torch.Tensor:
        """Takes its own weight for all."""
        return self.layer.weight * self.factor

    @property
    def width(self) -> int:
        """As it counts its own weight."""
        return len(self.layer.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A loss."""
        y = self.drop(self.layer(x)) if self.training else self.layer(x)
        return self.factor * self.activation(y).pow(self.options.power).mean()


class Outer(nn.Module):
    """A weight of the loss that a schedule may change."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.beta = Inner(), 1.0
        self.inner.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A loss."""
        return self.beta * self.inner(x)


def made() -> tuple[Outer, ParallelModel, torch.Tensor]:
    """The plain model and the parallel one, with the same weights, and a batch."""
    x = torch.linspace(-1, 1, 8 * WIDTH).double().view(8, WIDTH)
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Outer().double())
    parallel = merakc.auto_parallel(models[1], x, micro_batches=2, cluster=NOMINAL_CPU)
    return models[0], parallel, x


def set_beta(model: Any) -> None:
    model.beta = 0.25


def set_factor(model: Any) -> None:
    model.inner.factor = 3.0


def set_option(model: Any) -> None:
    model.inner.options.power = 4


def set_function(model: Any) -> None:
    model.inner.activation = torch.tanh


@pytest.mark.parametrize("change", [set_beta, set_factor, set_option, set_function])
def test_what_is_set_between_steps_is_computed_with(change: Any) -> None:
    plain, parallel, x = made()
    for act in (lambda _: None, change):
        act(plain)
        act(parallel)
        loss = parallel(x)
        assert loss.item() == pytest.approx(plain(x).item(), rel=1e-12)
    loss.backward()
    plain(x).backward()
    gradient = plain.inner.layer.weight.grad
    torch.testing.assert_close(parallel.full_gradients()["inner.layer.weight"], gradient)
    assert parallel.beta == plain.beta
    assert parallel.inner.factor == plain.inner.factor


def test_values_that_come_again_are_not_compiled_again() -> None:
    _, parallel, x = made()
    for beta in (1.0, 0.5, 1.0, 0.5):
        parallel.beta = beta
        parallel(x)
    assert len(parallel._own("_steps").compiled) == 2


def test_modes_of_parts() -> None:
    _, parallel, x = made()
    before = parallel(x).item()
    parallel.inner.train()
    assert parallel(x).item() != before
    parallel.inner.eval()
    assert parallel(x).item() == before
    assert not parallel.inner.training
    assert parallel.training


@pytest.mark.parametrize(
    "act",
    [
        lambda m: m.inner.register_forward_hook(lambda *_: None),
        lambda m: m.inner.layer.register_full_backward_hook(lambda *_: None),
        lambda m: setattr(m, "inner", nn.Linear(WIDTH, WIDTH)),
        lambda m: setattr(m.inner.layer, "weight", nn.Parameter(torch.ones(1))),
        lambda m: setattr(m.inner, "forward", lambda *_: None),
    ],
)
def test_what_would_go_unheard_is_refused(act: Any) -> None:
    _, parallel, _ = made()
    with pytest.raises(ConfigError, match="after auto_parallel"):
        act(parallel)


def test_a_refused_hook_says_what_works() -> None:
    _, parallel, x = made()
    layer = parallel.inner.layer
    with pytest.raises(ConfigError, match=r"for gradients p\.register_hook"):
        layer.register_full_backward_hook(lambda *_: None)
    seen: list[float] = []
    layer.weight.register_hook(lambda gradient: seen.append(float(gradient.norm())))
    parallel(x).backward()
    assert seen == [pytest.approx(layer.weight.grad.norm().item())]


def test_to_look_takes_no_time() -> None:
    """Of a model of a thousand modules, a few calls."""
    model = nn.Sequential(*(nn.TransformerEncoderLayer(4, 1, 4) for _ in range(100)))
    settings, calls = Settings(model), Counter[str]()
    assert settings.changed() == ()
    sys.setprofile(lambda frame, event, arg: calls.update([event]))
    try:
        settings.changed()
    finally:
        sys.setprofile(None)
    assert calls["call"] + calls["c_call"] < 100


class Walked(nn.Module):
    """Lists of modules, and a method that computes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Inner() for _ in range(2))
        self.scales = nn.ParameterList([torch.ones(1)])
        self.norm = nn.LayerNorm(WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A loss."""
        return self.scales[0] * sum(layer(self.norm(x)) for layer in self.layers)  # type: ignore[no-any-return]


def test_parts_are_of_the_users_types_and_compute_nothing() -> None:
    torch.manual_seed(0)
    plain = Walked()
    batch = torch.randn(4, WIDTH)
    model = merakc.auto_parallel(Walked(), batch, cluster=NOMINAL_CPU)
    kinds = [(n, type(m).__name__) for n, m in plain.named_modules()]
    assert [(n, type(m).__name__) for n, m in model.named_modules()] == kinds
    assert repr(model) == repr(plain)
    assert isinstance(model, Walked)
    assert inspect.signature(model.forward) == inspect.signature(plain.forward)
    assert isinstance(model.norm, nn.LayerNorm)
    assert "bias" in model.norm._parameters
    assert len(model.layers) == 2
    assert isinstance(model.layers[1], Inner)
    assert model.layers[0].layer.in_features == WIDTH
    assert model.scales[0].shape == (1,)
    assert model.scales[:1][0] is model.scales[0]
    assert [*model.layers[1:]] == [model.layers[1]]
    model.layers[:1].requires_grad_(False)
    assert [p.requires_grad for p in model.layers.parameters()] == [False, False, True, True]
    with pytest.raises(ConfigError, match="Linear is called by itself"):
        model.layers[0].layer(batch)
    with pytest.raises(ConfigError, match=r"Inner\.scaled is called after auto_parallel"):
        model.layers[0].scaled()
    with pytest.raises(AttributeError, match=r"Inner\.width is not there after auto_parallel"):
        model.layers[0].width  # noqa: B018
    assert not hasattr(type(model.layers[0]), "scaled")
    with torch.no_grad():
        model.layers[0].layer.weight -= 0.0  # which sets it to itself
    with pytest.raises(ConfigError, match="'bias' is set to a NoneType after auto_parallel"):
        model.layers[0].layer.bias = None
    with pytest.raises(ConfigError, match="'1' is deleted after auto_parallel"):
        del model.layers[1]
    model.layers.insert(0, Inner())
    with pytest.raises(ConfigError, match="module '0' was added to the model, taken out of it"):
        model(batch)


class Tagged(Inner):
    """A layer whose class says what it may set for itself."""

    tags: list[str] | None = None

    def add(self, tag: str) -> None:
        """As transformers' models do."""
        if self.tags is None:
            self.tags = []
        self.tags.append(tag)


class Counted(Tagged):
    """With methods as attributes, and something that is saved beside tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.measure, self.reads = nn.MSELoss().forward, self.scaled
        self.count = 3

    def get_extra_state(self) -> int:
        """For state dicts."""
        return self.count

    def set_extra_state(self, state: int) -> None:
        """From state dicts."""
        self.count = state


def test_methods_may_be_attributes_and_more_than_tensors_is_saved() -> None:
    model = merakc.auto_parallel(Counted().double(), made()[2], cluster=NOMINAL_CPU)
    assert model.measure(torch.ones(2), torch.zeros(2)) == 1
    with pytest.raises((AttributeError, ConfigError)):
        model.reads()
    found = model.full_state_dict()
    assert found.keys() == Counted().state_dict().keys()
    assert found["_extra_state"] == 3


def test_what_a_class_has_and_its_object_sets_is_read_as_set() -> None:
    model = merakc.auto_parallel(Tagged().double(), made()[2], cluster=NOMINAL_CPU)
    assert model.tags is None
    model.add("one")
    model.add("two")
    assert (model.tags, type(model).tags, Tagged.tags) == (["one", "two"], None, None)
    model.add = lambda tag: model.tags.append(f"new {tag}")  # type: ignore[method-assign]
    model.add("three")
    assert model.tags[-1] == "new three"
