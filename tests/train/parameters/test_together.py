"""Optimizers that update all parameters together train as in one process on every plan."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import merakc
from merakc.equality.ranks import RankError, run_ranks
from merakc.errors import CheckpointError, MerakWarning, MismatchError
from tests.train.parameters.test_idioms import LAYOUTS, Net, built, loss_of
from tests.train.parameters.test_optimizers import ByNorm

O = torch.optim  # noqa: E741


class Muon(O.Muon):
    """Does more behind a base's step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        found = super().step(closure)
        for p in self.param_groups[0]["params"]:
            p.div_(1 + 1e-3 * p.norm())
        return found


class Noisy(ByNorm):
    """Adds noise."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for p in self.param_groups[0]["params"]:
            p.data += 1e-3 * torch.randn_like(p)


MAKE: dict[str, Any] = {
    "line search": lambda p: O.LBFGS(p, max_iter=2, line_search_fn="strong_wolfe"),
    "by norm": ByNorm,
    "a kind of Muon": lambda p: Muon([x for x in p if x.ndim == 2], lr=0.02),
}
# Without a search, and those of the other kinds, which call back, too: on one plan.
MORE: dict[str, Any] = {
    "LBFGS": lambda p: O.LBFGS(p, lr=0.5, max_iter=2),
    "Muon": lambda p: O.Muon([x for x in p if x.ndim == 2], lr=0.02),
    "AdamW": lambda p: O.AdamW(p, lr=0.02),
}


def trained(model: Any, optimizer: O.Optimizer, steps: int) -> list[float]:
    def closure() -> float:
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        return float(loss.detach())

    def step() -> float:
        if type(optimizer) is not ByNorm:
            return float(optimizer.step(closure))  # type: ignore[arg-type]
        loss = closure()
        optimizer.step()
        return loss

    return [step() for _ in range(steps)]


def kinds_on(layout: dict[str, Any]) -> dict[str, Any]:
    return MAKE | MORE if layout == {"tp": 2} else MAKE


def on_ranks(layout: dict[str, Any]) -> dict[str, Any]:
    found, model = {}, built(layout)
    warnings.filterwarnings("ignore", "LBFGS updates all|ByNorm updates all", MerakWarning)
    for name, make in kinds_on(layout).items():
        model.load_state_dict(Net().state_dict())
        model.zero_grad()
        optimizer = make([*model.parameters()])
        losses = trained(model, optimizer, 2)
        optimizer.load_state_dict(optimizer.state_dict())
        losses += trained(model, optimizer, 1)
        found[name] = losses, model.full_state_dict()
    return found


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_they_train_as_in_one_process(layout: dict[str, Any]) -> None:
    everyone = run_ranks(2, partial(on_ranks, layout))
    for name, make in kinds_on(layout).items():
        plain = Net()
        optimizer = make([*plain.parameters()])
        wanted = trained(plain, optimizer, 3)
        assert wanted[-1] < wanted[0]
        for found in everyone:
            assert found[name][0] == pytest.approx(wanted, rel=1e-10), name
        for key, value in plain.state_dict().items():
            torch.testing.assert_close(everyone[0][name][1][key], value, rtol=1e-10, atol=1e-12)


def told(folder: Path) -> None:
    model = built({"tp": 2})
    loss_of(model).backward()
    optimizer = Noisy([*model.parameters()])
    torch.manual_seed(0)
    warned = pytest.warns(MerakWarning, match="every rank holds all 472 elements")
    with warned if model.rank == 0 else nullcontext():
        optimizer.step()
    with pytest.raises(CheckpointError, match="Noisy updates all parameters together"):
        merakc.save(folder, model, optimizer)
    torch.manual_seed(model.rank)
    optimizer.step()


def test_what_is_told(tmp_path: Path) -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(2, partial(told, tmp_path))
    assert MismatchError.__name__ in str(caught.value)
    assert "give all ranks one seed" in str(caught.value)
