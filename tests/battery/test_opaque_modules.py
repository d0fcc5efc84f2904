"""Modules that cannot be recorded, in models that train on several ranks, against one process."""

from __future__ import annotations

import contextlib
import random
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import merakc
from benchmarks.layouts import Task, train_layout, worst_difference
from benchmarks.models import Batch, ModelCase
from benchmarks.ranks import run_ranks
from benchmarks.reference import train_reference
from merakc.equality.compare import Reference
from merakc.ir.batches import PER_MICRO_BATCH
from merakc.ir.program import Mesh
from merakc.machines.cluster import NOMINAL_CPU
from tests.battery.small_models import Words, build, parallel, warm_up, words

WIDTH = 8
SCRAMBLE = 1e3  # with it every branch is taken in every step


class Experts(nn.Module):
    """Each token goes to the experts that like it, none or all: the loop is not rows in another
    order. How many go to which is not known before.
    """

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        flat = x.flatten(0, -2)
        weights = self.router(flat).softmax(-1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            (rows,) = torch.where(weights[:, number] > 0.3)
            out.index_add_(0, rows, expert(flat[rows]) * weights[rows, number, None])
        return out.view_as(x), {"load": weights.amax(-1).mean()}


class Branching(nn.Module):
    """Which half of it runs depends on its weights, which change from step to step."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("lefts", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        if (self.left.weight.sum() * SCRAMBLE).floor() % 2 > 0:
            self.lefts += 1
            return self.left(x), {"load": x.new_zeros(())}
        return self.right(x).tanh(), {"load": x.new_zeros(())}


class Sparse(nn.Module):
    """Its own shapes depend on the values, and what it returns does not."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        places = (x > 0).nonzero()
        kept = x[places[:, 0], places[:, 1], places[:, 2]]
        out = torch.zeros_like(x).index_put(places.unbind(1), kept * self.scale[places[:, 2]])
        return x * self.scale + out, {"load": x.new_zeros(())}


class Model(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, WIDTH)
        self.before = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH))
        self.inner = kind()
        self.after = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH))
        self.again = kind()
        self.head = nn.Linear(WIDTH, 16)

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embedding(ids)
        x = x + self.before(x)
        inner, facts = self.inner(x)
        x = x + inner
        x = x + self.after(x)
        again, more = self.again(x)
        loss = F.cross_entropy(self.head(x + again).flatten(0, 1), labels.flatten())
        return {"loss": loss + 0.1 * (facts["load"] + more["load"])}


def batch(batch_size: int, generator: torch.Generator) -> Batch:
    ids = torch.randint(0, 16, (batch_size, 5), generator=generator)
    return {"ids": ids, "labels": ids.roll(1, 1)}


def case(kind: type[nn.Module]) -> ModelCase:
    return ModelCase(
        kind.__name__,
        lambda dropout: Model(kind),
        batch,
        lambda b: b["labels"].numel(),
    )


def train_quietly(task: Task) -> Reference:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", merakc.MerakWarning)
        return train_layout(task)


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    warm_up()


@pytest.mark.parametrize(
    ("kind", "mesh"),
    [(Experts, Mesh(tp=2)), (Branching, Mesh(dp=2)), (Sparse, Mesh(pp=2))],
    ids=str,
)
def test_training_is_that_of_one_process(kind: type[nn.Module], mesh: Mesh) -> None:
    tried, steps = case(kind), 2
    task = Task(tried, mesh, 8, 4, steps, False, cluster=NOMINAL_CPU)
    ranks = run_ranks(mesh.world_size, train_quietly, task)
    dp = mesh.dp if tried.running_statistics else 1
    plain = train_reference(tried, batch_size=8, micro_batches=4, steps=steps, dp=dp)
    difference = worst_difference(ranks[0], [r.losses for r in ranks], plain, 1e-10)
    assert difference.error < 1e-10, difference


def test_a_plan_names_them_and_a_warning_is_given_for_each() -> None:
    model = case(Experts).model(torch.float64)
    given = case(Experts).batch(4)
    with pytest.warns(merakc.MerakWarning) as caught:
        plan = merakc.auto_parallel(model, given).plan
    texts = [str(w.message) for w in caught]
    assert len(texts) == 2
    assert texts[0].startswith("a part of module 'inner' cannot be recorded")
    assert texts[1].startswith("a part of module 'again' cannot be recorded")
    assert [m.name for m in plan.opaque_modules] == ["inner", "again"]
    assert all("depend" in m.reason for m in plan.opaque_modules)
    assert all(__file__ in m.source for m in plan.opaque_modules)
    assert all(0.0 < m.flops_share < 0.5 for m in plan.opaque_modules)
    assert not any("opaque" in op for op in plan.whole_ops)


class Noisy(nn.Module):
    """Draws from every generator, by an amount that depends on the data."""

    def forward(self, x: Tensor) -> Tensor:
        scale = float(random.random()) if x.sum().item() > -1e9 else 1.0
        return x * torch.rand_like(x) * scale


def noisy_losses(mesh: Mesh) -> tuple[list[float], list[float]]:
    """Losses of steps on the same weights, and gradients' sums."""

    def make() -> nn.Module:
        model = Words(blocks=2)
        model.blocks[0].append(Noisy())
        return model

    found: tuple[list[float], list[float]] = ([], [])
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore", merakc.MerakWarning)
        degrees = {"tp": mesh.tp, "pp": mesh.pp, "micro_batches": 2}
        model = parallel(make, words(0), **degrees, couplings=PER_MICRO_BATCH)
        before = torch.get_rng_state()
        for _ in range(2):
            loss = model(**words(0))["loss"]
            loss.backward()
            found[0].append(loss.item())
            grads: dict[str, Any] = model.full_gradients()
            found[1].append(sum(float(g.abs().sum()) for g in grads.values()))
            model.zero_grad()
        assert torch.equal(torch.get_rng_state(), before)
    return found


def test_random_numbers_follow_from_the_steps_seed_in_every_layout() -> None:
    one = noisy_losses(Mesh())
    assert one[0][0] != one[0][1]  # another step, other numbers
    meshes = Mesh(pp=2), Mesh(tp=2)
    for other in run_ranks(2, lambda: [noisy_losses(mesh) for mesh in meshes])[0]:
        torch.testing.assert_close(torch.tensor(one), torch.tensor(other), rtol=1e-5, atol=0.0)


def test_the_model_itself_cannot_run_as_it_is() -> None:
    class Whole(Model):
        def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
            out = super().forward(ids, labels)
            return out if out["loss"].item() > 0 else {"loss": out["loss"] * 2}

    given = case(Sparse).batch(4)
    with pytest.raises(merakc.MerakError, match=r"depends on the data, in module ''"):
        merakc.auto_parallel(build(lambda: Whole(Sparse)), given)
