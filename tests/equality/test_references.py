"""What a plan is compared with: the whole batch, but for what is of each part by convention."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.layouts import worst_difference
from merakc.equality.compare import Reference
from merakc.equality.ranks import run_ranks
from merakc.equality.references import Yardstick, yardstick
from merakc.equality.train import Case, train_on_rank
from merakc.ir.batches import PER_MICRO_BATCH, WHOLE_BATCH, BatchLayout, Couplings, Rows
from merakc.ir.program import Mesh
from merakc.ir.strategy import Strategy
from merakc.lowering.lowered import make_plan
from merakc.lowering.recording import record_part
from merakc.machines.cluster import NOMINAL_CPU

PARTS, SAMPLES = 4, 16
NAMED = pytest.mark.filterwarnings("ignore:by convention")  # as is looked at here


class Pieces(nn.Module):
    """A loss of any of these terms, behind a norm or none."""

    def __init__(self, *terms: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.terms = terms
        self.up, self.out = nn.Linear(6, 8), nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8) if "norm" in terms else nn.Identity()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("var", torch.ones(8))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The loss."""
        if "noise" in self.terms:
            x = x + torch.randn_like(x)
        h = self.norm(self.up(x))
        if "own norm" in self.terms:
            h = F.batch_norm(h, self.mean, self.var, training=True)
        z = self.out(torch.tanh(h))
        loss = z.square().mean() if "plain" in self.terms else F.cross_entropy(z, labels)
        if "contrast" in self.terms:
            other = F.cross_entropy(z @ z.T, torch.arange(len(z)))
            loss = loss + other if "both" in self.terms else other
        return loss


def case(*terms: str, couplings: Couplings = WHOLE_BATCH) -> Case:
    """A plan of one rank for a batch with uneven labels."""
    model = Pieces(*terms).double()
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(8, (SAMPLES,), generator=generator)
    labels[:5] = -100
    batch = {"x": torch.randn(SAMPLES, 6, generator=generator).double(), "labels": labels}
    layout = BatchLayout((SAMPLES,), PARTS)
    cpu = torch.device("cpu")
    recording = record_part(model, (), batch, layout, cpu, couplings=couplings)
    plan = make_plan(
        recording, Strategy().on(Mesh(), micro_batches=PARTS, batch_size=SAMPLES), NOMINAL_CPU
    ).plan
    return Case(model, plan, (batch,), lift=True)


def distance(tried: Case, reference: Yardstick) -> float:
    """Between a plan and its reference, on a rank."""

    def both() -> tuple[Reference, Reference]:
        return train_on_rank(deepcopy(tried)), reference.train(tried)

    ((ours, wanted),) = run_ranks(1, both)
    return worst_difference(ours, [ours.losses], wanted, 1e-10).error


def check(tried: Case, *words: str) -> Yardstick:
    """The reference, once it says these words and the plan is seen to be equal to it."""
    found = yardstick(tried)
    assert all(word in found.what for word in words), found.what
    assert distance(tried, found) < 1e-12
    return found


def test_a_loss_is_that_of_the_whole_batch() -> None:
    for terms in ((), ("contrast",), ("contrast", "both")):
        found = check(case(*terms), "the plain model in one process, on the whole batch")
        assert found == Yardstick(found.what)
        assert "as the plan says" not in found.what
    apart = Yardstick("averages of micro-batches", parts=PARTS)
    assert distance(case(), apart) > 1e-3, "labels are uneven"
    assert distance(case("contrast"), apart) > 1e-3


def test_a_batch_norm_keeps_its_micro_batch_and_labels_do_not() -> None:
    tried = case("norm")
    found = check(
        tried, "the plain model in one process, on the whole batch, its batch norms over each",
        "as the plan says: batch norm is over each micro-batch by itself, at", "test_references.py",
    )  # fmt: skip
    assert found.norms == {"norm": Rows()}
    assert distance(tried, Yardstick("whole")) > 1e-3
    assert distance(tried, Yardstick("averages", parts=PARTS)) > 1e-3
    check(case("norm", "contrast", "both"), "on the whole batch, its batch norms over each")


@NAMED
def test_a_coupling_of_each_micro_batch_is_named() -> None:
    tried = case("contrast", couplings=PER_MICRO_BATCH)
    found = check(
        tried, "the plain model in one process, micro-batch by micro-batch",
        "as the plan says: each micro-batch by itself, at", "samples meet other samples",
    )  # fmt: skip
    assert found.parts == PARTS
    assert distance(tried, Yardstick("whole")) > 1e-3
    # Nothing is coupled, so that nothing is of each micro-batch.
    assert yardstick(case(couplings=PER_MICRO_BATCH)).parts == 1


@NAMED
def test_what_no_plain_model_can_do_at_once_is_left_to_merakc_and_said() -> None:
    both = check(
        case("contrast", "both", couplings=PER_MICRO_BATCH),
        "one process of merakc, in 4 micro-batches (", "each micro-batch by itself, at",
    )  # fmt: skip
    assert both.alone is not None
    assert both.buffers
    check(case("own norm"), "one process of merakc, in 4 micro-batches (", "batch norm is over")
    drawn = check(case("noise"), "one process of merakc, on the whole batch (the model draws")
    assert drawn.alone is not None
    assert drawn.alone.micro_batches == 1
    normed = check(case("noise", "norm"), "in 4 micro-batches (the model draws", "batch norm")
    assert normed.alone is not None
    assert normed.alone.micro_batches == PARTS
