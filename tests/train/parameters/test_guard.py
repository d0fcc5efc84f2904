"""Methods of the user's own model, on a model of which ranks hold parts."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Self

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import merakc
from merakc.equality.ranks import run_ranks
from merakc.errors import ConfigError, MerakWarning
from merakc.machines.cluster import NOMINAL_CPU

WIDTH = 8


class Behind:
    """A base that stands behind `nn.Module`, as those of transformers do."""

    def penalty(self) -> torch.Tensor:
        """Computes with all elements."""
        return sum(p.square().sum() for p in self.parameters())  # type: ignore[attr-defined, no-any-return]


class Net(nn.Module, Behind):
    """Methods of many kinds."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width, self._scale = width, 2.0
        self.net = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, 2))

    @classmethod
    def of(cls, width: int) -> Self:
        """Makes a plain one."""
        return cls(width)

    @property
    def count(self) -> int:
        """The elements of all parameters."""
        return sum(p.numel() for p in self.parameters())

    @property
    def scale(self) -> float:
        """What the loss is multiplied by."""
        return self._scale

    @scale.setter
    def scale(self, value: float) -> None:
        self._scale = value

    def linears(self) -> Iterator[nn.Linear]:
        """Its layers."""
        yield from (m for m in self.net if isinstance(m, nn.Linear))

    def freeze(self) -> None:
        """The first layer."""
        for parameter in self.net[0].parameters():
            parameter.requires_grad_(False)

    def training_step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The loss, by a call of the model."""
        loss: torch.Tensor = self(x, y)
        return loss

    def weights(self) -> dict[str, Any]:
        """For a file."""
        return dict(self.state_dict())

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """A loss."""
        loss = self._scale * nn.functional.mse_loss(self.net(x), target)
        return loss + 1.0 if getattr(self, "shifted", False) else loss


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """The same on all ranks."""
    drawn = torch.Generator().manual_seed(0)
    return tuple(torch.randn(8, n, generator=drawn).double() for n in (WIDTH, 2))  # type: ignore[return-value]


def net() -> Net:
    """The same on all ranks."""
    torch.manual_seed(0)
    return Net(WIDTH).double()


def refusal(act: Any) -> str:
    try:
        act()
    except ConfigError as error:
        return str(error)
    return ""


def on_ranks(layout: dict[str, int]) -> dict[str, Any]:
    model: Any = merakc.auto_parallel(net(), batch(), cluster=NOMINAL_CPU, **layout)
    found: dict[str, Any] = {"count": model.count, "layers": [*map(str, model.linears())]}
    found["loss"] = [model.training_step(*batch()).item()]
    model.scale = 3.0
    found["loss"].append(model(*batch()).item())
    model.shifted = True
    found["loss"].append(model(*batch()).item())
    seen: list[Any] = []
    handle = model.register_forward_hook(lambda *call: seen.append(call[-1].item()))
    model.training_step(*batch())
    handle.remove()
    found["hooked"] = seen
    model.freeze()
    model(*batch()).backward()
    found["frozen"] = all(p.grad is None for p in model.net[0].parameters())
    found["penalty"] = model.penalty().item()
    found["weights"] = refusal(model.weights)
    found["plain"] = type(model.of(2)) is Net
    found["shown"] = repr(model)
    return found


@pytest.mark.parametrize(
    "layout", [{"tp": 2}, {"pp": 2}, {"dp": 2, "state_shards": "zero-1"}], ids=str
)
def test_methods_see_the_whole_or_are_refused(layout: dict[str, Any]) -> None:
    plain = net()
    losses = [plain(*batch()).item()]
    penalty = plain.penalty().item()
    losses += [1.5 * losses[0], 1.5 * losses[0] + 1.0]
    for rank, found in enumerate(run_ranks(2, on_ranks, layout)):
        assert found["count"] == plain.count
        assert len(found["layers"]) == 2
        assert found["loss"] == pytest.approx(losses, rel=1e-12)
        assert found["hooked"] == found["loss"][-1:]
        assert found["frozen"]
        assert found["plain"]
        assert found["penalty"] == pytest.approx(penalty, rel=1e-12)
        assert "Net.weights reads state_dict()" in found["weights"]
        assert "merakc.export(folder, model)" in found["weights"]
        assert f"rank {rank} of dp=" in found["shown"]
    split = {"tp": "part 1 of 2 of [32* x 8]", "pp": "weight [32, 8] on other pipeline ranks"}
    assert split.get(next(iter(layout)), "weight: 79 of 256 elements") in found["shown"]


class Doubled(nn.Module):
    """A parametrization that would give its tensor other values before it is told to the model."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight

    def right_inverse(self, weight: torch.Tensor) -> torch.Tensor:
        return weight / 2


def doubled(module: nn.Module) -> nn.Module:
    """With it on its weight."""
    return parametrize.register_parametrization(module, "weight", Doubled())


PARAMETRIZED = {
    "weight norm": parametrizations.weight_norm,
    "doubled": doubled,
    "orthogonal": parametrizations.orthogonal,
}
TRAINED = [parametrizations.weight_norm, doubled]  # those that may be split into samples


def parametrized(layout: dict[str, int]) -> tuple[dict[str, str], list[float]]:
    """What is said of each, of a layer that this rank holds and of another; losses then, and those
    of models that had the parametrization before.
    """
    model: Any = merakc.auto_parallel(net(), batch(), cluster=NOMINAL_CPU, **layout)
    said = {
        f"{name} {k}": refusal(partial(act, model.net[k]))
        for name, act in PARAMETRIZED.items()
        for k in (0, 2)
    }
    losses = [model(*batch()).item()]
    for act in TRAINED:
        plain = net()
        act(plain.net[0])
        first: Any = merakc.auto_parallel(plain, batch(), cluster=NOMINAL_CPU, **layout)
        losses.append(first(*batch()).item())
    return said, losses


@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}], ids=str)
def test_parametrizations_are_for_before_on_every_rank(layout: dict[str, int]) -> None:
    plain = [net()(*batch()).item()]
    for act in TRAINED:
        act((other := net()).net[0])
        plain.append(other(*batch()).item())
    for said, losses in run_ranks(2, parametrized, layout):
        assert {n: t for n, t in said.items() if "before auto_parallel" not in t} == {}
        assert losses == pytest.approx(plain, rel=1e-10)


def test_methods_of_a_whole_model_are_as_they_were() -> None:
    model: Any = merakc.auto_parallel(net(), batch(), cluster=NOMINAL_CPU)
    plain = net()
    torch.testing.assert_close(model.penalty(), plain.penalty())
    assert model.weights().keys() == plain.weights().keys()


def test_a_method_that_ours_hides_is_named() -> None:
    class Predicting(Net):
        def predict(self) -> None:
            """Another thing."""

    with pytest.warns(MerakWarning, match="predict of a Predicting are merakc's"):
        merakc.auto_parallel(Predicting(WIDTH).double(), batch(), cluster=NOMINAL_CPU)
