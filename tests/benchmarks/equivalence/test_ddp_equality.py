"""Comparing with DDP bit by bit: equal is equal, and a last bit is seen."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist

from benchmarks.equivalence import ddp_equality
from benchmarks.equivalence.ddp_equality import LABELS, even_batch, train_ddp, unequal_to_ddp
from benchmarks.equivalence.uneven import UNEVEN
from benchmarks.models import IGNORED, MODELS
from benchmarks.ranks import run_ranks
from benchmarks.reference import split_batch, train_reference
from merakc.ir.state import StateShards


@pytest.mark.parametrize("name", ["gpt2", "t5", "vit"])
def test_samples_have_a_power_of_two_of_labels(name: str) -> None:
    case = MODELS[name]
    batch = even_batch(case, 0)
    labels = (batch["labels"] != IGNORED).reshape(len(batch["labels"]), -1).sum(1)
    assert set(labels.tolist()) == {1 if name == "vit" else LABELS}
    assert case.valid_labels(batch) == labels.sum()


def _both_orders() -> list[torch.Tensor]:
    batches = [split_batch(even_batch(UNEVEN, 0), 2)[dist.get_rank()]]
    found = [train_ddp(UNEVEN, batches, 2, reduce_each=each)[0][0] for each in (False, True)]
    return [torch.cat([g.reshape(-1) for g in own.values()]) for own in found]


def test_both_orders_of_ddp_add_up_the_whole_batch() -> None:
    (late, early), other = run_ranks(2, _both_orders)
    assert torch.equal(late, other[0])
    assert not torch.equal(late, early)  # or there would be nothing to tell apart
    torch.testing.assert_close(late, early)
    plain = train_reference(UNEVEN, batch_size=8, micro_batches=4, steps=1).gradients[0]
    torch.testing.assert_close(late, torch.cat([g.reshape(-1) for g in plain.values()]))


@pytest.mark.parametrize("counts", [(1, 1, 2), (1, 2, 2)])
def test_shards_are_equal_to_ddp(counts: tuple[int, int, int]) -> None:
    assert run_ranks(2, unequal_to_ddp, UNEVEN, StateShards(*counts), 2, 2) == ["", ""]


def test_sums_within_products_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ddp_equality, "added_apart", nullcontext)
    (text, _) = run_ranks(2, unequal_to_ddp, MODELS["gpt2"], StateShards(1, 1, 2), 2, 1)
    assert text.startswith("gradient of step 0")
    assert float(text.split()[-1]) < 1e-15


def test_another_order_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = train_ddp

    def other(*args: object, reduce_each: bool) -> object:
        return plain(*args, reduce_each=not reduce_each)  # type: ignore[arg-type]

    monkeypatch.setattr(ddp_equality, "train_ddp", other)
    texts = run_ranks(2, unequal_to_ddp, UNEVEN, StateShards(1, 2, 2), 2, 1)
    assert texts[0].startswith("gradient of step 0")
