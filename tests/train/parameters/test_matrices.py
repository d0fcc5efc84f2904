"""Optimizers that need whole tensors train as in one process on every plan, and go on on others."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_optimizer import Lion, Shampoo
from transformers.optimization import Adafactor

import merakc
from merakc.equality.ranks import run_ranks
from merakc.runtime.part import plain
from merakc.train.parameters import matrices
from tests.train.parameters.test_idioms import Net, built, loss_of

O = torch.optim  # noqa: E741


def muon(model: Any) -> list[O.Optimizer]:
    """As people use it: matrices by Muon, the rest by AdamW."""
    matrices = [p for p in model.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if p.ndim != 2]
    return [O.Muon(matrices, lr=0.02), O.AdamW(rest, lr=0.02)]


MAKE: dict[str, Any] = {
    "Muon": muon,
    "Adafactor": lambda m: [O.Adafactor(m.parameters(), lr=0.05)],
    "transformers' Adafactor": lambda m: [Adafactor(m.parameters())],
    "Shampoo": lambda m: [Shampoo(m.parameters(), lr=0.01)],
    "fused Adam": lambda m: [O.Adam(m.parameters(), lr=0.02, fused=True)],
    "Lion": lambda m: [Lion(m.parameters(), lr=0.01)],
}
UNSAVED = {"Shampoo"}  # lists of tensors, which checkpoints refuse


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


def elements(optimizers: list[O.Optimizer]) -> int:
    """Of all that they keep here."""
    states = [s for o in optimizers for s in o.state.values()]
    tensors = [v for s in states for v in s.values() if isinstance(v, torch.Tensor)]
    return sum(plain(v).numel() for v in tensors)


def on_ranks(layout: dict[str, Any], folder: Path) -> dict[str, Any]:
    found, model = {}, built(layout)
    matrices.TRAVEL_BYTES = 2048  # of two matrices or three: several buffers
    for name, make in MAKE.items():
        model.load_state_dict(Net().state_dict())
        model.zero_grad()
        optimizers = make(model)
        losses = trained(model, optimizers, 2)
        if name not in UNSAVED:
            merakc.save(folder / name, model, optimizers)
        losses += trained(model, optimizers, 1)
        found[name] = losses, model.full_state_dict(), elements(optimizers)
    return found


def resumed(layout: dict[str, Any], folder: Path) -> dict[str, list[float]]:
    found, model = {}, built(layout) if layout else Net()
    for name in sorted(MAKE.keys() - UNSAVED):
        optimizers = MAKE[name](model)
        merakc.load(folder / name, model, optimizers)
        for optimizer in optimizers:  # what a rank keeps for itself comes back, too
            optimizer.load_state_dict(optimizer.state_dict())
        found[name] = trained(model, optimizers, 2)
    return found


# What is trained on, and what goes on with it.
LAYOUTS: list[tuple[dict[str, Any], list[dict[str, Any]]]] = [
    ({"pp": 2}, [{"dp": 2, "state_shards": "zero-1"}]),
    ({"dp": 2, "tp": 2, "state_shards": "zero-3"}, [{"tp": 2}, {}]),
]


def ranks_of(layout: dict[str, Any]) -> int:
    return layout.get("dp", 1) * layout.get("tp", 1) * layout.get("pp", 1)  # type: ignore[no-any-return]


@pytest.mark.parametrize(("layout", "others"), LAYOUTS)
def test_optimizers(layout: dict[str, Any], others: list[dict[str, Any]], tmp_path: Path) -> None:
    everyone = run_ranks(ranks_of(layout), partial(on_ranks, layout, tmp_path))
    after = [x for o in others for x in run_ranks(ranks_of(o), partial(resumed, o, tmp_path))]
    for name, make in MAKE.items():
        plain = Net()
        optimizers = make(plain)
        wanted = trained(plain, optimizers, 3)
        for found in everyone:
            assert found[name][0] == pytest.approx(wanted, rel=1e-10), name
            if "state_shards" in layout:  # each tensor's is on one of its ranks
                assert found[name][2] < 0.75 * elements(optimizers)
        for key, value in plain.state_dict().items():
            torch.testing.assert_close(everyone[0][name][1][key], value, rtol=1e-10, atol=1e-12)
        wanted += trained(plain, optimizers, 1)
        for of_rank in after if name not in UNSAVED else ():
            assert of_rank[name] == pytest.approx(wanted[2:], rel=1e-10), name


def listed_otherwise() -> tuple[list[float], dict[str, torch.Tensor]]:
    model = built({"tp": 2})
    of_two = [p for p in model.parameters() if p.ndim == 2]
    optimizer = O.Muon(of_two[::-1] if model.rank else of_two, lr=0.02)
    return trained(model, [optimizer], 2), model.full_state_dict()


def test_ranks_may_list_parameters_in_orders_of_their_own() -> None:
    found = run_ranks(2, listed_otherwise)
    net = Net()
    wanted = trained(net, [O.Muon([p for p in net.parameters() if p.ndim == 2], lr=0.02)], 2)
    for losses, _ in found:
        assert losses == pytest.approx(wanted, rel=1e-10)
    for key, value in net.state_dict().items():
        torch.testing.assert_close(found[0][1][key], value, rtol=1e-10, atol=1e-12)
