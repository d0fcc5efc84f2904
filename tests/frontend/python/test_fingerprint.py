"""A model is the same after a rebuild and in another process; a difference is named."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from merakc.frontend.python.fingerprint import fingerprint, first_difference
from merakc.frontend.record import record
from merakc.ir.plan import GraphId

ROOT = Path(__file__).resolve().parents[3]


class Block(nn.Module):
    def __init__(self, width: int, wide: int, factor: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, wide), nn.Linear(wide, width)
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu()) * self.factor


class Net(nn.Module):
    def __init__(
        self,
        layers: int = 3,
        width: int = 4,
        wide: tuple[int, ...] = (8, 8, 8, 8),
        factors: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0),
        mask: float = 1.0,
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, wide[k], factors[k]) for k in range(layers))
        self.head = nn.Linear(width, 2)
        self.mask = torch.full((width,), mask)  # neither parameter nor buffer: a constant

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x * self.mask).square().mean()


def identity(
    dtype: torch.dtype = torch.float32, batch: int = 2, frozen: str = "", **sizes: Any
) -> GraphId:
    model = Net(**sizes).to(dtype)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name != frozen)
    model.mask = model.mask.to(dtype)
    x = torch.ones(batch, sizes.get("width", 4), dtype=dtype)
    return fingerprint(record(model, (x,), {}).graph)


def test_a_rebuilt_model_is_the_same() -> None:
    assert identity() == identity()
    assert first_difference(identity(), identity()) == ""


def test_another_process_gives_the_same_hash() -> None:
    code = f"from {__name__} import identity; print(identity().hash)"
    seeded = {**os.environ, "PYTHONHASHSEED": "7", "OMP_NUM_THREADS": "1"}
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=seeded, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    assert found.stdout.strip() == identity().hash


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"layers": 4},
            "the model's own forward is planned where the model has module 'blocks.3.up'",
        ),
        (
            {"layers": 2},
            "module 'blocks.2.up' is planned where the model has the model's own forward",
        ),
        ({"wide": (8, 8, 9, 8)}, "module 'blocks.2.up' computes something else"),
        ({"factors": (1.0, 2.0, 1.0, 1.0)}, "module 'blocks.1' computes something else"),
        ({"mask": 2.0}, "the model's own forward computes something else"),
        ({"frozen": "blocks.1.down.bias"}, "module 'blocks.1.down' computes something else"),
        (
            {"batch": 3},
            "the batch (its names, shapes or dtypes): it is made for another batch_size=",
        ),
        (
            {"width": 5},
            "the batch (its names, shapes or dtypes): it is made for another batch_size=",
        ),
        (
            {"dtype": torch.float64},
            "the batch (its names, shapes or dtypes): it is made for another batch_size=",
        ),
    ],
)
def test_the_first_difference_is_named(change: dict[str, Any], words: str) -> None:
    planned, found = identity(), identity(**change)
    assert planned.hash != found.hash
    assert first_difference(planned, found).startswith(words)


def _scaled(function: Callable[[Tensor], Tensor]) -> GraphId:
    class Apply(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, given: Callable[[Tensor], Tensor]) -> Tensor:
            return given(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            return grad, None

    class Applied(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = Apply.apply(super().forward(x), function)
            return out.sum()

    return fingerprint(record(Applied(2, 2), (torch.ones(1, 2),), {}).graph)


def test_where_an_argument_lies_in_memory_is_left_out() -> None:
    assert _scaled(lambda x: x * 2) == _scaled(lambda x: x * 2)


def test_a_graph_longer_than_its_plan_is_told() -> None:
    planned = identity()
    longer = GraphId("other", (*planned.modules, ("more", "0")))
    assert first_difference(planned, longer) == (
        "nothing more is planned where the model has module 'more'"
    )
