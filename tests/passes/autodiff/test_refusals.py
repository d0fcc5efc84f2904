"""What is said of backwards that cannot be, and that the remedies work."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import merakc
from merakc.errors import RecordError
from merakc.machines.cluster import NOMINAL_CPU

F8 = torch.float8_e4m3fn


def scaled(x: Tensor, w: Tensor) -> Tensor:
    one = torch.ones(())
    return torch._scaled_mm(x.to(F8), w.to(F8).t(), one, one, out_dtype=torch.bfloat16).float()


class Scaled(torch.autograd.Function):
    """A scaled product that says its gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return scaled(x, w)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return grad @ w, grad.t() @ x


class Model(nn.Module):
    """A scaled product of a weight, called in three ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way, self.w, self.head = way, nn.Parameter(torch.randn(32, 16)), nn.Linear(32, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """A mean of squares."""
        if self.way == "function":
            y = Scaled.apply(x, self.w)
        else:
            y = scaled(x, self.w.detach() if self.way == "detached" else self.w)
        return {"loss": self.head(y).pow(2).mean()}


def test_a_call_without_a_derivative_is_named() -> None:
    with pytest.raises(RecordError, match=r"test_refusals.py:\d+: torch has no derivative of _sca"):
        merakc.auto_parallel(Model(""), {"x": torch.ones(8, 16)}, cluster=NOMINAL_CPU)


@pytest.mark.parametrize("way", ["function", "detached"])
def test_its_remedies_work(way: str) -> None:
    x, plain = torch.randn(8, 16), Model(way)
    plain(x)["loss"].backward()
    model = merakc.auto_parallel(Model(way), {"x": x}, cluster=NOMINAL_CPU)
    model(x=x)["loss"].backward()
    for name, parameter in plain.named_parameters():
        found = model.get_parameter(name).grad
        if parameter.grad is None:
            assert found is None
        else:
            assert found is not None
            assert torch.allclose(found, parameter.grad, rtol=1e-6)
