"""Optimizers that need whole tensors train as in one process on every plan, and save what they keep."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers.optimization import Adafactor

import merakc
from merakc.equality.ranks import run_ranks
from merakc.errors import ConfigError
from merakc.runtime.part import plain
from tests.train.parameters.test_idioms import Net, built, loss_of

O = torch.optim  # noqa: E741


class Shampoo(O.Optimizer):
    """Preconditions matrices from both sides (Gupta et al., arXiv 1802.09568)."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        del closure
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                grad, state = p.grad.view(p.shape[0], -1), self.state[p]
                for side, g in (("left", grad @ grad.T), ("right", grad.T @ grad)):
                    state[side] = state.get(side, 1e-2 * torch.eye(len(g), dtype=g.dtype)) + g
                    values, vectors = torch.linalg.eigh(state[side])
                    root = vectors @ torch.diag(values.pow(-0.25)) @ vectors.T
                    grad = root @ grad if side == "left" else grad @ root
                p.sub_(grad.view_as(p), alpha=group["lr"])


def muon(model: Any) -> list[O.Optimizer]:
    """As people use it: matrices by Muon, the rest by AdamW."""
    matrices = [p for p in model.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if p.ndim != 2]
    return [O.Muon(matrices, lr=0.02), O.AdamW(rest, lr=0.02)]


def lion(model: Any) -> list[O.Optimizer]:
    return [Lion(model.parameters())]


class Lion(O.Optimizer):
    """Signs of momentum (Chen et al., arXiv 2302.06675)."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        del closure
        for p in (p for group in self.param_groups for p in group["params"]):
            momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
            p.sub_(torch.sign(0.9 * momentum + 0.1 * p.grad), alpha=self.param_groups[0]["lr"])
            momentum.lerp_(p.grad, 0.01)


MAKE: dict[str, Any] = {
    "Muon": muon,
    "Adafactor": lambda m: [O.Adafactor(m.parameters(), lr=0.05)],
    "transformers' Adafactor": lambda m: [Adafactor(m.parameters())],
    "Shampoo": lambda m: [Shampoo(m.parameters())],
    "Lion": lion,
}


def trained(model: Any, optimizers: list[O.Optimizer], steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = loss_of(model)
        loss.backward()
        losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return losses


def on_ranks(layout: dict[str, Any], folder: Path) -> dict[str, Any]:
    found = {}
    for name, make in MAKE.items():
        model = built(layout)
        model.load_state_dict(Net().state_dict())
        optimizers = make(model)
        losses = trained(model, optimizers, 2)
        merakc.save(folder / name, model, optimizers)
        losses += trained(model, optimizers, 2)
        kept = sum(v.numel() for o in optimizers for s in o.state.values()
                   for v in s.values() if isinstance(v, torch.Tensor) and v.dim())  # fmt: skip
        found[name] = losses, model.full_state_dict(), kept
    return found


def resumed(layout: dict[str, Any], folder: Path) -> dict[str, list[float]]:
    found = {}
    for name, make in MAKE.items():
        model = built(layout) if layout else Net()
        optimizers = make(model)
        merakc.load(folder / name, model, optimizers)
        for optimizer in optimizers:  # what a rank keeps for itself comes back, too
            optimizer.load_state_dict(optimizer.state_dict())
        found[name] = trained(model, optimizers, 2)
    return found


LAYOUTS: list[dict[str, Any]] = [
    {"tp": 2}, {"pp": 2}, {"dp": 2, "state_shards": "zero-1"},
    {"dp": 2, "tp": 2, "state_shards": "zero-3"},
]  # fmt: skip


@pytest.mark.parametrize("at", range(len(LAYOUTS)))
def test_optimizers(at: int, tmp_path: Path) -> None:
    layout, other = LAYOUTS[at], ({}, *LAYOUTS)[at]
    sizes = [of.get("dp", 1) * of.get("tp", 1) * of.get("pp", 1) for of in (layout, other)]
    everyone = run_ranks(sizes[0], partial(on_ranks, layout, tmp_path))
    after = run_ranks(sizes[1], partial(resumed, other, tmp_path))
    for name, make in MAKE.items():
        plain_model = Net()
        optimizers = make(plain_model)
        wanted = trained(plain_model, optimizers, 4)
        for found in everyone:
            assert found[name][0] == pytest.approx(wanted, rel=1e-10), name
        for key, value in plain_model.state_dict().items():
            torch.testing.assert_close(everyone[0][name][1][key], value, rtol=1e-10, atol=1e-12)
        for of_rank in after:
            assert of_rank[name] == pytest.approx(wanted[2:], rel=1e-10), name
