"""Sharded parameters, gradients and optimizer state train as one process does."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import merakc
from benchmarks.layouts import Task, train_layout, worst_difference
from benchmarks.models import MODELS
from benchmarks.ranks import RankError, run_ranks
from benchmarks.reference import train_reference
from merakc.equality.compare import Reference
from merakc.errors import ConfigError
from merakc.ir.plan_file import PlanFile
from merakc.ir.program import Mesh
from merakc.ir.state import StateShards
from merakc.machines.cluster import NOMINAL_CPU

STEPS, BATCH_SIZE = 2, 8
# In parts of several sizes; tied embeddings over two stages.
CASES = [
    (Mesh(dp=4), (2, 4, 4)),
    (Mesh(dp=2, pp=2), (2, 2, 2)),
]


@cache
def reference() -> Reference:
    return train_reference(
        MODELS["gpt2"], batch_size=BATCH_SIZE, micro_batches=BATCH_SIZE, steps=STEPS,
        lift_casts=True,
    )  # fmt: skip


@pytest.mark.parametrize(("mesh", "shards"), CASES, ids=str)
def test_training_equals_one_process(mesh: Mesh, shards: tuple[int, int, int]) -> None:
    case = MODELS["gpt2"]
    task = Task(
        case, mesh, BATCH_SIZE, BATCH_SIZE, STEPS, lift_casts=True, state_shards=shards,
        cluster=NOMINAL_CPU,
    )  # fmt: skip
    found = run_ranks(mesh.world_size, partial(train_layout, task))
    losses = [f.losses for f in found]
    assert worst_difference(found[0], losses, reference(), 1e-10).error < 1e-10


class Mixed(nn.Module):
    """A frozen, an unused and a small parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(5, 7), nn.Linear(7, 3)
        self.a.bias.requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(3))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """The mean is over the samples."""
        return {"loss": (self.b(torch.tanh(self.a(x))) * self.scale).square().mean()}


def batch(dp: int) -> torch.Tensor:
    return torch.linspace(-1, 1, 8 * 5).view(8, 5).double().chunk(2)[dp]


def trained(**options: object) -> dict[str, object]:
    given = {"micro_batches": 2, "cluster": NOMINAL_CPU} | options
    model = merakc.auto_parallel(Mixed().double(), {"x": batch(0)}, **given)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    norms = []
    for _ in range(3):
        model(x=batch(model.data_parallel_rank))["loss"].backward()
        norms.append(float(model.clip_grad_norm_(0.05)))
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        shown = float(model(x=batch(model.data_parallel_rank))["loss"])
    own = {n: p.detach().as_subclass(torch.Tensor) for n, p in model.named_parameters()}
    local = {name: tuple(p.shape) for name, p in own.items()}
    return {
        "norms": norms, "shown": shown, "local": local, "plan": model.plan, "file": model.plan_file,
        "full": model.full_state_dict(),
    }  # fmt: skip


@cache
def unsharded() -> list[dict[str, Any]]:
    return run_ranks(2, partial(trained, dp=2))


@pytest.mark.parametrize("shards", ["zero-1", "zero-3"])
def test_frozen_and_unused_parameters_and_the_norm(shards: str) -> None:
    plain = unsharded()
    found = run_ranks(2, partial(trained, dp=2, state_shards=shards))
    assert found[0]["norms"] == pytest.approx(plain[0]["norms"], rel=1e-12)
    assert found[1]["norms"] == found[0]["norms"]
    assert found[0]["shown"] == pytest.approx(plain[0]["shown"], rel=1e-12)
    for name, value in plain[0]["full"].items():
        torch.testing.assert_close(found[0]["full"][name], value, rtol=1e-12, atol=1e-14)
    sizes = [sum(torch.Size(r["local"][n]).numel() for r in found) for n in ("a.weight", "scale")]
    assert sizes == [35, 1]  # each element is one rank's
    frozen = [torch.Size(r["local"]["a.bias"]).numel() for r in found]
    assert frozen == ([4, 3] if shards == "zero-3" else [7, 7])  # sharded as parameters are
    assert all(len(r["local"]["a.weight"]) == 2 for r in found)  # parts keep their dims


class Detached(nn.Module):
    """Tied over two stages, of which the second gives no gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """The mean is over the samples."""
        hidden = torch.tanh(self.b(torch.tanh(self.a(x))))
        return {"loss": (hidden @ self.a.weight.detach()).square().mean()}


def tied_once(**options: object) -> dict[str, torch.Tensor]:
    model = merakc.auto_parallel(
        Detached().double(), {"x": batch(0)}, micro_batches=2, cluster=NOMINAL_CPU, **options
    )
    assert model.plan.parameters["a.weight"] == (0, 1)
    model(x=batch(model.data_parallel_rank))["loss"].backward()
    return model.full_gradients()


@pytest.mark.parametrize("shards", [["zero-0", "zero-2"], ["zero-3", "zero-1"]])
def test_a_tied_parameter_with_gradients_of_one_stage_alone(shards: object) -> None:
    model = Detached().double()
    model(torch.cat([batch(0), batch(1)]))["loss"].backward()
    found = run_ranks(4, partial(tied_once, dp=2, pp=2, state_shards=shards))[0]
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-12, atol=1e-14)


def test_state_that_does_not_fit_is_sharded_and_trains_alike() -> None:
    plain = unsharded()
    needed = plain[0]["file"].prediction.peak_bytes[0]
    tiny = replace(NOMINAL_CPU, memory_bytes=int(0.96 * needed))
    found = run_ranks(2, partial(trained, dp=2, cluster=tiny))
    assert plain[0]["plan"].state_shards == ()
    (shards,) = found[0]["plan"].state_shards
    assert shards.optimizer == 2
    assert found[0]["norms"] == pytest.approx(plain[0]["norms"], rel=1e-12)
    for name, value in plain[0]["full"].items():
        torch.testing.assert_close(found[0]["full"][name], value, rtol=1e-12, atol=1e-14)


def test_a_plan_keeps_its_shards(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    (first, _) = run_ranks(2, partial(trained, dp=2, state_shards=(1, 2, 2)))
    PlanFile(first["plan"]).save(path)
    assert merakc.load_plan(path).decisions.state_shards == (StateShards(1, 2, 2),)
    (again, _) = run_ranks(2, partial(trained, plan=path))
    assert again["local"] == first["local"]
    with pytest.raises(RankError, match="contradicts the plan's state_shards=1, 2, 2"):
        run_ranks(2, partial(trained, plan=path, state_shards="zero-3"))


WRONG: tuple[tuple[object, str], ...] = (
    ("zero-4", "'zero-4' is not known; choose one of auto, zero-0, zero-1"),
    ((1, 1), "must be three numbers"),
    ((1, 1, 3), "3 must divide the 2 ranks"),
    ((2, 1, 2), "gradients must be|must divide the next"),
)


def refusals() -> list[str]:
    found = []
    for given, _ in WRONG:
        with pytest.raises(ConfigError) as error:
            trained(dp=2, state_shards=given)
        dist.barrier()
        found.append(str(error.value))
    return found


def test_wrong_shards_are_refused() -> None:
    for rank in run_ranks(2, refusals):
        for (_, text), found in zip(WRONG, rank, strict=True):
            assert re.search(text, found)
