"""Ranks that share experts train as one process does."""

from __future__ import annotations

from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import merakc
from benchmarks.expert_loops import EXPERT_LOOPS, LoopedExperts
from benchmarks.layouts import Task, train_layout, worst_difference
from benchmarks.models import HIDDEN, MODELS
from benchmarks.ranks import run_ranks
from benchmarks.zoo_models import ZOO
from merakc.equality.casts import lifted_casts
from merakc.ir.program import Mesh
from merakc.machines.cluster import NOMINAL_CPU
from merakc.runtime.part import plain
from tests.battery.small_models import clipped_steps
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
    ("mixtral_balanced", Mesh(2, cp=2, experts=True), {"state_shards": "zero-3"}),
    ("qwen3_moe", Mesh(cp=2, pp=2, experts=True), {"state_shards": "zero-2"}),
    ("gpt_oss", Mesh(tp=2, cp=2, experts=True), {"state_shards": "zero-1"}),
    ("deepseek_v3", Mesh(2, cp=2, experts=True), {"state_shards": (1, 2, 2)}),
]


@pytest.mark.parametrize(("model", "mesh", "options"), CASES, ids=str)
def test_training_equals_one_process(model: str, mesh: Mesh, options: dict[str, Any]) -> None:
    options = dict(options)
    micro_batches = options.pop("micro_batches", MICRO_BATCHES)
    shards = options.pop("state_shards", None)
    task = Task(
        EVERY[model], mesh, BATCH_SIZE, micro_batches, STEPS, lift_casts=True,
        cluster=NOMINAL_CPU, state_shards=shards, options=options,
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


class Routed(nn.Module):
    """Words, a mixture and what stands around it, with a weight that the loss reads, too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.mixture = nn.Embedding(11, HIDDEN), LoopedExperts("added")
        self.norm, self.out = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 11)
        self.scale = nn.Parameter(torch.ones(HIDDEN))
        self.double()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """The loss."""
        x = self.words(ids)[:, None]
        x = F.scaled_dot_product_attention(x, x, x, is_causal=True)[:, 0] * self.scale.exp()
        x = x + self.mixture(self.norm(x))
        far = F.cross_entropy(self.out(x).transpose(1, 2), ids)
        return far + 0.1 * self.out.weight.square().sum() + self.scale.sum()


Kept = tuple[list[float], dict[str, torch.Tensor], dict[str, int]]


def _routed(layout: dict[str, Any] | None, folder: Path, muon: bool) -> Kept:
    """Losses and norms of steps on texts of several lengths, of which neither 3 texts nor one token
    divide over two ranks, and the weights; with a `layout` saved in the middle, and gone on with
    from there. Last, the elements of each parameter that the optimizer keeps a number of.
    """
    draw = torch.Generator().manual_seed(1)
    dp = layout["dp"] if layout else 1
    batches = [torch.randint(11, (3 * 2, length), generator=draw) for length in (7, 1, 6, 1)]
    model: Any = Routed()
    if layout:
        own = batches[0][: 6 // dp]
        model = merakc.auto_parallel(model, (own,), pp=1, cluster=NOMINAL_CPU, **layout)
    matrices = [p for p in model.parameters() if muon and p.dim() == 2]
    if muon:
        optimizer: Any = torch.optim.Muon(matrices, lr=1e-2)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rank = model.data_parallel_rank if layout else 0
    parts = [ids[rank * (6 // dp) : (rank + 1) * (6 // dp)] for ids in batches]
    found = clipped_steps(model, optimizer, parts, layout and folder)
    kept = {
        name: plain(optimizer.state[p]["exp_avg"]).numel()
        for name, p in model.named_parameters()
        if not muon
    }
    return found, model.full_state_dict() if layout else model.state_dict(), kept


@pytest.mark.parametrize(
    ("layout", "muon"),
    [
        ({"dp": 1, "ep": 2, "state_shards": "zero-1", "micro_batches": 2}, False),
        ({"dp": 2, "ep": 2, "state_shards": "zero-3", "micro_batches": 1}, False),
        ({"dp": 1, "ep": 2, "tp": 2, "state_shards": "zero-1", "micro_batches": 2}, True),
    ],
    ids=str,
)
def test_ranks_that_share_a_weight_share_its_state(
    layout: dict[str, Any], muon: bool, tmp_path: Path
) -> None:
    """Of experts those of dp, of all else those of ep, too. Norms, clipping and checkpoints count
    every element once, also where all ranks compute the same.
    """
    (wanted, weights, whole), *_ = run_ranks(1, _routed, None, tmp_path, muon)
    every = run_ranks(
        layout["dp"] * 2 * layout.get("tp", 1), _routed, layout, tmp_path / "saved", muon
    )
    for found, _, _ in every:
        assert found == pytest.approx(wanted, rel=1e-12)
    for name, value in weights.items():
        torch.testing.assert_close(every[0][1][name], value, rtol=1e-10, atol=1e-12)
    if not muon:  # each element is on one rank alone
        experts = {n for n in whole if "experts" in n and n.endswith("weight")}
        for names in (experts, whole.keys() - experts):
            share = sum(whole[n] for n in names) / len(every)
            for *_, own in every:
                assert sum(own[n] for n in names) == pytest.approx(share, rel=0.02)
