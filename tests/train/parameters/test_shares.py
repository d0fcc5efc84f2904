"""A number of which ranks have shares is communicated when it is read, however that is done."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

from merakc.equality.ranks import run_ranks
from merakc.train.parameters.shares import Share
from tests.train.parameters.test_idioms import Net, built


def read() -> dict[str, float]:
    model = built({"tp": 2})

    def share() -> Any:
        return model.a.weight.detach().norm()

    if model.rank == 0:  # what needs no value waits for no other rank
        found = share()
        assert isinstance(found.to(torch.float32).cpu(), Share)
        assert (found.shape, found.dtype, found.dim()) == ((), torch.float64, 0)
        assert isinstance(torch.stack([found, found]), Share)
    changed = share()
    changed.mul_(2.0)
    changed += 1.0
    return {
        "float": float(share()),
        "item": share().item(),
        "format": float(f"{share():.17g}"),
        "compared": float(share() > 1.0),
        "a tensor": torch.tensor([share()]).double().item(),
        "as one": torch.as_tensor(share(), dtype=torch.float64).item(),
        "pickled": pickle.loads(pickle.dumps(share())).item(),
        "copied": copy.deepcopy(share()).item(),
        "of two": torch.norm(torch.stack([share(), share()])).item(),
        "of a list": torch.stack([share(), share()])[1].item(),
        "changed": float(changed),
        "its own": (model.a.weight * share()).detach().sum().item(),
    }


def test_all_ways_to_read_one() -> None:
    weight = Net().a.weight.detach()
    norm = float(weight.norm())
    wanted = dict.fromkeys(("float", "item", "format", "as one", "pickled", "copied"), norm)
    wanted |= {"a tensor": norm, "of two": 2**0.5 * norm, "changed": 2 * norm + 1}
    wanted |= {"of a list": norm, "compared": 1.0, "its own": norm * float(weight.sum())}
    for found in run_ranks(2, read):
        assert {k: v for k, v in found.items() if k != "a tensor"} == pytest.approx(
            {k: v for k, v in wanted.items() if k != "a tensor"}, rel=1e-12
        )
        assert found["a tensor"] == pytest.approx(norm, rel=1e-6)  # torch's default dtype
