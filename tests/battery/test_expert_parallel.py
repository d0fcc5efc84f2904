"""Ranks that share experts train as one process does."""

from __future__ import annotations

from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

import merakc
from benchmarks.expert_loops import EXPERT_LOOPS
from benchmarks.layouts import Task, train_layout, worst_difference
from benchmarks.models import MODELS
from benchmarks.ranks import run_ranks
from benchmarks.zoo_models import ZOO
from merakc.equality.casts import lifted_casts
from merakc.ir.program import Mesh
from merakc.machines.cluster import NOMINAL_CPU
from tests.battery.test_context_parallel import BATCH_SIZE, MICRO_BATCHES, STEPS, reference
from tests.passes.sharding.experts.test_sorted_forms import Other

EVERY = {**ZOO, **MODELS, **EXPERT_LOOPS}
CASES: list[tuple[str, Mesh, dict[str, Any]]] = [
    ("mixtral", Mesh(cp=2, pp=2, experts=True), {"recompute": "full"}),
    ("mixtral", Mesh(cp=2, experts=True), {"offload": "activations", "recompute": "none"}),
    ("gpt_oss", Mesh(cp=2, experts=True), {"recompute": "selective"}),
    ("loop_uneven", Mesh(cp=4, experts=True), {}),
    ("loop_index_add", Mesh(cp=2, experts=True), {"overlap": 2, "micro_batches": 2}),
    ("loop_hit", Mesh(cp=2, experts=True), {}),
    ("loop_normed", Mesh(2, cp=2, experts=True), {}),
    ("loop_uneven", Mesh(tp=2, cp=2, experts=True), {"overlap": 2}),
    ("deepseek_v3", Mesh(tp=2, cp=2, experts=True), {"recompute": "full"}),
    ("loop_capacity", Mesh(2, cp=2, experts=True), {"recompute": "full"}),
]


@pytest.mark.parametrize(("model", "mesh", "options"), CASES, ids=str)
def test_training_equals_one_process(model: str, mesh: Mesh, options: dict[str, Any]) -> None:
    options = dict(options)
    micro_batches = options.pop("micro_batches", MICRO_BATCHES)
    task = Task(
        EVERY[model], mesh, BATCH_SIZE, micro_batches, STEPS, lift_casts=True,
        cluster=NOMINAL_CPU, options=options,
    )  # fmt: skip
    found = run_ranks(mesh.world_size, partial(train_layout, task))
    losses = [f.losses for f in found]
    assert worst_difference(found[0], losses, reference(model), 1e-10).error < 1e-10


Figures = list[tuple[float, float]]


def _goes_on(name: str, folder: Path, options: dict[str, Any], steps: range) -> Figures:
    """Losses and norms of some steps, from what is in the folder; which holds what they leave."""
    case = EVERY[name]
    with lifted_casts():
        model, batch = case.model(torch.float64), case.batch(BATCH_SIZE, torch.float64)
        if options:
            model = merakc.auto_parallel(
                model, batch, dp=1, pp=1, micro_batches=2, cluster=NOMINAL_CPU, **options
            )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if steps.start:
            merakc.load(folder, model, optimizer)
        found = []
        for step in steps:
            loss = model(**case.batch(BATCH_SIZE, torch.float64, seed=step))["loss"]
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            found.append((loss.item(), float(norm)))
            optimizer.step()
            optimizer.zero_grad()
        if not steps.start and options:
            merakc.save(folder, model, optimizer)
    return found


@pytest.mark.parametrize(
    ("name", "given", "others"),
    [
        ("mixtral", {"ep": 2, "tp": 2}, [{"ep": 4}, {"tp": 2}, {}]),
        ("loop_index_add", {"ep": 2}, [{"ep": 2, "tp": 2}, {"tp": 2}]),
    ],
)
def test_a_checkpoint_goes_on_with_other_ranks_of_experts(
    tmp_path: Path, name: str, given: dict[str, int], others: list[dict[str, int]]
) -> None:
    """And weights are clipped by the norm of all experts."""
    wanted = _goes_on(name, tmp_path, {}, range(4))
    options = {**given, "expert_load": (4, 1, 1, 1)}
    found = run_ranks(prod(given.values()), _goes_on, name, tmp_path, options, range(2))[0]
    assert found[1] == pytest.approx(wanted[1])
    for other in others:  # the last is the plain model
        steps = (name, tmp_path, other, range(2, 4))
        found = run_ranks(prod(other.values()), _goes_on, *steps)[0]
        for own, other in zip(found, wanted[2:], strict=True):
            assert own == pytest.approx(other, rel=1e-10)


def _otherwise(how: str, options: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of a mixture that is written otherwise, and its weights."""
    model: Any = Other().double()
    model.how = how
    given = torch.randint(16, (2, 6), generator=torch.Generator().manual_seed(0))
    if options:
        batch = {"ids": given, "labels": given}
        model = merakc.auto_parallel(
            model, batch, dp=1, pp=1, micro_batches=1, cluster=NOMINAL_CPU, **options
        )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(3):
        loss = model(ids=given, labels=given)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.full_state_dict() if options else model.state_dict()


@pytest.mark.parametrize("how", ["order alone", "unsorted", "in the loss"])
def test_mixtures_that_are_written_otherwise(how: str) -> None:
    losses, weights = _otherwise(how, {})
    found, ours = run_ranks(2, _otherwise, how, {"ep": 2})[0]
    assert found == pytest.approx(losses, rel=1e-10)
    for name, value in weights.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-10, atol=1e-12)


def _without_gradients(options: dict[str, Any]) -> tuple[set[str], set[str]]:
    """The parameters that have no gradient behind a step: all, and those that a rank holds."""
    case = EVERY["loop_hit"]
    model, batch = case.model(torch.float64), case.batch(BATCH_SIZE, torch.float64)
    if options:
        model = merakc.auto_parallel(
            model, batch, dp=1, pp=1, micro_batches=2, cluster=NOMINAL_CPU, **options
        )
    model(**batch)["loss"].backward()
    own = {n for n, p in model.named_parameters() if p.grad is None}
    return own, own if not options else {*model.state_dict()} - {*model.full_gradients()}


def test_experts_that_nobody_has_chosen_have_no_gradients() -> None:
    wanted, _ = _without_gradients({})
    assert wanted
    assert all(".experts.3." in name for name in wanted)
    found = run_ranks(2, _without_gradients, {"ep": 2})
    assert found[0][1] == wanted  # the first rank has all
    assert all(wanted <= own for own, _ in found)
    assert run_ranks(1, _without_gradients, {"tp": 1}) == [(wanted, wanted)]
