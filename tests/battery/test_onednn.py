"""Products by oneDNN: in every kind of layout a step trains as one process does with torch's."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from torch import nn

import merakc
from benchmarks.ranks import run_ranks
from merakc.kernels import gemm
from merakc.machines.cluster import NOMINAL_CPU
from tests.battery.small_models import Tensors, first_part, part
from tests.passes.lockstep import relative_error

# Half of a product, as of two tp ranks or micro-batches, is large enough.
ROWS, WIDTH = 256, 256
# In float32, of gradients that are sums over all rows.
BOUND = 1e-5


class Residual(nn.Module):
    """Linear layers with biases and without, all but the last used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 2 * WIDTH)
        self.second = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.third = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for _ in range(2):
            x = x + self.second(torch.tanh(self.first(x)))
            x = self.third(x)
        return {"loss": self.last(x).square().mean()}


def model() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Residual()


def batch() -> Tensors:
    generator = torch.Generator().manual_seed(1)
    return {"x": torch.randn(2, ROWS // 2, WIDTH, generator=generator)}


def train(options: dict[str, Any]) -> tuple[float, Tensors, set[str]]:
    """The loss of a step, its gradients, and which ops its stages ran."""
    patch = pytest.MonkeyPatch()
    patch.setattr(gemm, "gain", lambda: 2.0)
    example = first_part(batch(), options.get("dp", 1))
    made = merakc.auto_parallel(model(), example, cluster=NOMINAL_CPU, **options)
    loss = made(**part(batch(), made))["loss"]
    loss.backward()
    chunks = [c for step in made._steps.compiled.values() for c in step.chunks.values()]
    graphs = [g for c in chunks for g in (c.forward, c.backward, c.weight_grad) if g is not None]
    patch.undo()
    return loss.item(), made.full_gradients(), {n.op for g in graphs for n in g.nodes}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tp": 2},
        {"pp": 2, "micro_batches": 2, "schedule": "zb-h1"},
        {"dp": 2, "state_shards": "zero-3"},
        {"compile": True, "micro_batches": 2},
    ],
    ids=str,
)
def test_trains_as_one_process(options: dict[str, Any]) -> None:
    if "compile" in options and not (shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("no C++ compiler here")
    plain = model().double()
    wanted = plain(batch()["x"].double())["loss"]
    wanted.backward()
    ranks = max(options.get(axis, 1) for axis in ("dp", "tp", "pp"))
    loss, gradients, ops = run_ranks(ranks, train, options)[0]
    assert loss == pytest.approx(wanted.item(), rel=1e-6)
    for name, parameter in plain.named_parameters():
        assert parameter.grad is not None
        assert relative_error(gradients[name], parameter.grad) < BOUND
    assert "merakc.mm.default" in ops


class Plain(nn.Module):
    """Has no loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.layer(x)
        return hidden


@pytest.mark.filterwarnings("ignore:the forward of Plain returns no loss")
def test_with_a_loss_outside_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "gain", lambda: 2.0)
    made = merakc.auto_parallel(Plain(), batch(), cluster=NOMINAL_CPU)
    used = []
    for rows in range(2):
        x = batch()["x"][:, rows:]
        nn.functional.mse_loss(made(x=x), x).backward()
        used.append([*made._steps.compiled.values()][-1].lowered.onednn)
    assert used == [True, False]


@pytest.mark.parametrize("first", [0, 1])
def test_only_of_what_is_planned_or_trained_first(
    first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """oneDNN keeps the kernels of every shape."""
    monkeypatch.setattr(gemm, "gain", lambda: 2.0)
    made = merakc.auto_parallel(model(), batch(), cluster=NOMINAL_CPU)
    for rows in range(first, first + 3):
        made(x=batch()["x"][:, rows:])["loss"].backward()
    made.eval()(**batch())
    steps = made._steps.compiled.values()
    wanted = {0: [True, False, False, True], 1: [True, True, False, False, True]}
    assert [step.lowered.onednn for step in steps] == wanted[first]
