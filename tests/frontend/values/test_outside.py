"""A model and the loss of its outputs, as one module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from merakc.errors import ConfigError
from merakc.frontend.record import record
from merakc.frontend.values.outside import WithLoss, parted, stand_in


class Scaled(nn.Module):
    """Takes two tensors, the second by choice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> dict[str, torch.Tensor]:
        """The output."""
        return {"y": self.layer(x) * scale}


def squared(outputs: Any, batch: Any) -> torch.Tensor:
    return (outputs["y"] - batch["target"]).square().mean()


def test_names_are_the_models_and_the_loss_is_found() -> None:
    model = Scaled()
    both = WithLoss(model, squared)
    assert dict(both.named_parameters()).keys() == dict(model.named_parameters()).keys()
    assert parted(both) == (model, squared)
    assert parted(model) == (model, None)
    made = record(both, (), {"x": torch.zeros(4, 3), "target": torch.zeros(4, 2)})
    assert made.has_loss
    assert made.is_beside
    assert made.model_name == "Scaled"
    assert {i.target for i in made.graph.inputs} == {"x", "target", "layer.weight", "layer.bias"}
    assert not record(model, (), {"x": torch.zeros(4, 3)}).has_loss


def test_what_the_model_and_the_loss_are_given() -> None:
    x, target = torch.zeros(4, 3), torch.zeros(4, 2)
    seen: list[Any] = []

    def loss(outputs: Any, batch: Any) -> torch.Tensor:
        seen.append(batch)
        return outputs["y"].sum()  # type: ignore[no-any-return]

    both = WithLoss(Scaled(), loss)
    both(x=x, target=target)
    both(x, 2.0, target)  # one position more than the forward has
    both(x)
    both(x, scale=2.0, target=target)
    assert seen == [
        {"x": x, "target": target}, (x, 2.0, target), x, {"x": x, "scale": 2.0, "target": target},
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="give all by keyword"):
        both(x, 2.0, target, weight=target)
    assert WithLoss(Scaled(), None)(x=x, target=target)["y"].shape == (4, 2)


def test_what_is_no_loss() -> None:
    with pytest.raises(ConfigError, match="Linear has parameters of its own"):
        WithLoss(Scaled(), nn.Linear(2, 2))
    with pytest.raises(ConfigError, match=r"returns a tensor of shape \[4, 2\]; it must return"):
        WithLoss(Scaled(), lambda outputs, _: outputs["y"])(torch.zeros(4, 3))
    with pytest.raises(ConfigError, match="returns a float"):
        WithLoss(Scaled(), lambda *_: 1.0)(torch.zeros(4, 3))


def test_a_stand_in_is_of_what_is_trained() -> None:
    outputs = {"y": torch.ones(2, requires_grad=True), "ids": torch.zeros(2).long()}
    assert stand_in(outputs, None).item() == 1.0
    assert stand_in({"ids": outputs["ids"]}, None) is None


class Moded(nn.Module):
    """A loss with a mode and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.ones(()))

    def forward(self, outputs: Any, _: Any) -> torch.Tensor:
        """A number."""
        return outputs["y"].sum() * self.weight  # type: ignore[no-any-return]


def test_modules_of_a_loss_are_looked_at() -> None:
    loss = Moded()
    assert loss in list(WithLoss(Scaled(), loss).modules())
