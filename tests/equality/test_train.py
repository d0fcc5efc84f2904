"""Both sides of a comparison: they agree where they should, and only there."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from benchmarks.layouts import worst_difference
from merakc.equality.ranks import run_ranks
from merakc.equality.train import Case, comparable, train_in_one_process, train_on_rank
from merakc.errors import ConfigError
from merakc.ir.program import Mesh
from merakc.ir.strategy import Strategy
from merakc.lowering.lowered import make_plan
from merakc.machines.cluster import NOMINAL_CPU
from tests.recorded import recorded


class Words(nn.Module):
    """With dropout and a cast to float32 of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.drop = nn.Embedding(7, 4), nn.Dropout(0.5)
        self.head = nn.Linear(4, 7)

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.head(self.drop(torch.tanh(self.table(ids).float())))
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten()), logits


def _batch(seed: int, samples: int = 8) -> torch.Tensor:
    return torch.randint(7, (samples, 5), generator=torch.Generator().manual_seed(seed))


def _case(mesh: Mesh) -> Case:
    model = Words().double()
    with comparable(lift=True):
        local = _batch(0, 8 // mesh.dp)
        recording = recorded(model, (local,), 2, dp=mesh.dp)
    plan = make_plan(
        recording, Strategy().on(mesh, micro_batches=2, batch_size=8 // mesh.dp), NOMINAL_CPU
    ).plan
    return Case(model, plan, (_batch(0), _batch(1)), lift=True)


def test_ranks_and_one_process_agree_without_dropout_and_casts() -> None:
    case = _case(Mesh(dp=2, pp=2))
    found = run_ranks(4, train_on_rank, case)
    (reference,) = run_ranks(1, train_in_one_process, case)
    (parts,) = run_ranks(1, partial(train_in_one_process, case, parts=4))
    losses = [f.losses for f in found]
    assert worst_difference(found[0], losses, reference, 1e-10).error < 1e-12
    assert worst_difference(parts, [parts.losses], reference, 1e-10).error < 1e-12
    assert set(reference.gradients[1]) == {"table.weight", "head.weight", "head.bias"}
    swapped = replace(case, batches=case.batches[::-1])
    (other,) = run_ranks(1, train_in_one_process, swapped)
    assert worst_difference(found[0], losses, other, 1e-10).error > 1e-3


def test_a_batch_without_values_is_refused() -> None:
    case = _case(Mesh())
    empty = replace(case, batches=(_batch(0).to("meta"),))
    with pytest.raises(ConfigError, match="the batch is on the meta device"):
        train_in_one_process(empty, parts=2)
