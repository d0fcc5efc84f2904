"""Calls with the whole job's batch give what one process computes of it, results included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import merakc
from merakc.equality.ranks import run_ranks
from merakc.errors import ConfigError
from merakc.machines.cluster import NOMINAL_CPU

SAMPLES, WIDTH = 7, 6
Answer = dict[str, Any]


class Net(nn.Module):
    """A loss, and an output for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 12), nn.Tanh(), nn.Linear(12, 3))

    def forward(self, x: torch.Tensor, items: torch.Tensor) -> Answer:
        """The loss is a sum over a number that is the same for all samples."""
        out = self.net(x)
        told = {"count": len(x), "shape": out.shape}
        return {"loss": out.square().sum() / items, "out": out, "mean": out.mean(), "told": told}


def made() -> tuple[Net, torch.Tensor]:
    torch.manual_seed(0)
    return Net().double(), torch.randn(SAMPLES, WIDTH).double()


def on_ranks() -> tuple[float, Answer, Answer, str]:
    net, x = made()
    items = torch.tensor(11.0).double()
    model: Any = merakc.auto_parallel(net, (x[:4], items), cluster=NOMINAL_CPU, dp=2)
    model.read_whole_batches()
    found = model(x, items)
    found["loss"].backward()
    with pytest.raises(ConfigError) as refused:
        model(x[:1], items)
    answer = model.predict(x, items)
    return found["loss"].item(), answer, model.full_gradients(), str(refused.value)


def test_calls_take_the_whole_batch() -> None:
    net, x = made()
    wanted = net(x, torch.tensor(11.0).double())
    wanted["loss"].backward()
    ranks = run_ranks(2, on_ranks)
    told = wanted.pop("told")
    for loss, answer, _, said in ranks:
        assert answer.pop("told") == told
        assert loss == pytest.approx(wanted["loss"].item(), rel=1e-12)
        for name, value in wanted.items():
            torch.testing.assert_close(answer[name], value.detach(), rtol=1e-12, atol=1e-12)
        assert "batches of [1, 0] samples" in said
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(ranks[0][2][name], parameter.grad, rtol=1e-12, atol=1e-12)
