"""A number of which ranks have shares is communicated when it is read, however that is done."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import merakc
from merakc.equality.ranks import run_ranks
from merakc.machines.cluster import NOMINAL_CPU
from merakc.train.parameters.shares import Share
from tests.train.parameters.test_idioms import Net, built
from tests.train.parameters.test_norms import batch


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


class Spectral(nn.Module):
    """Weights of frequencies, as Fourier neural operators have them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(6, 6, dtype=torch.complex128))
        self.out = nn.Linear(6, 6, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """The mean is over the samples."""
        seen: torch.Tensor = self.out((x.to(torch.complex128) @ self.weight).abs())
        return {"loss": seen.square().mean()}


def of_complex(options: dict[str, Any] | None) -> list[float]:
    model: Any = Spectral()
    dp = (options or {}).get("dp", 1)
    if options is not None:
        model = merakc.auto_parallel(
            model, batch(0, dp), micro_batches=2, cluster=NOMINAL_CPU, **options
        )
    loss = model(batch(model.data_parallel_rank if options else 0, dp))["loss"]
    (loss + 0.1 * model.weight.norm()).backward()
    gradient = model.weight.grad
    norms = [gradient.norm(), gradient.norm(1), torch.linalg.vector_norm(gradient, 0)]
    assert {n.dtype for n in norms[:2]} == {torch.float64}
    clipped = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    return [float(x) for x in (*norms, clipped, gradient.norm(), model.weight.detach().norm())]


@pytest.mark.parametrize(
    "options", [{"dp": 2, "state_shards": "zero-3"}, {"tp": 2}, {"pp": 2}], ids=str
)
def test_norms_of_complex_parameters(options: dict[str, Any]) -> None:
    wanted = of_complex(None)
    for found in run_ranks(2, of_complex, {"dp": 1, **options}):
        assert found == pytest.approx(wanted, rel=1e-12)
