"""What Python makes of the batch, sample by sample, is that of the whole batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from merakc.passes.batches.aligned import KNOWN, is_own
from merakc.passes.batches.alike import OtherPathError
from merakc.passes.batches.states import Kind
from tests.passes.batches.forwards import Batch, Loss, Small, check, in_parts


def positions(b: Batch) -> Tensor:
    """Numbers for each sample, made of what Python reads of it, and of how many came before."""
    found, before = torch.zeros(len(b["label"]), 3, dtype=torch.float64), 0
    for k, label in enumerate(b["label"].tolist()):
        found[k, : label + 1] = torch.arange(label + 1) + before
        before += label
    return found


def rows_of_python(b: Batch) -> Tensor:
    return torch.cat([torch.arange(3)[None] * int(k) for k in b["label"]])


ROWS: dict[str, Loss] = {
    "positions": lambda m, z, b: (z * positions(b)).sum(),
    "joined": lambda m, z, b: (z * rows_of_python(b)).square().sum(),
    "words": lambda m, z, b: (m.table(rows_of_python(b).clamp(max=4)).sum(1) * z).sum(),
    "beside a count": lambda m, z, b: (z * positions(b)).sum() / b["mask"].sum(),
    "a largest number": lambda m, z, b: (z[:, : int(b["label"].max()) + 1]).square().sum(),
}


@pytest.mark.parametrize("name", ROWS)
def test_it_is_a_value_of_the_whole_batch(name: str) -> None:
    step = check(ROWS[name])
    assert step.loss.kind is Kind.SUM
    assert step.splits[0].head is None


def test_the_way_to_it_is_that_of_the_whole_batch() -> None:
    step = in_parts(ROWS["positions"])
    found = step.found[0]
    assert sum(n.op == KNOWN for n in found.part.nodes) == 1
    assert not any(is_own(n.name) for n in found.part.nodes)
    assert not any("slice" in n.op for n in step.graph.nodes)
    known = step.splits[0].known
    assert known is not None
    assert sum("slice_scatter" in n.op for n in known.whole.graph.nodes) >= 6


def test_calls_behind_parameters_are_the_same_for_all() -> None:
    def one_by_one(m: Small, z: Tensor, b: Batch) -> Tensor:
        return torch.stack([m.other(x).sum() * k for k, x in enumerate(b["x"])]).sum() + z.sum()

    with pytest.raises(OtherPathError, match="one by one"):
        in_parts(one_by_one)
