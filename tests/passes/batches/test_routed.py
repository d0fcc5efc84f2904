"""Rows in the order of their experts, and samples taken apart, are rows again behind them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import merakc.kernels.experts  # noqa: F401  registers the op
from merakc.errors import RecordError
from merakc.passes.batches.states import SAMPLES, Kind
from tests.passes.batches.forwards import CLASSES, SIZES, Batch, Loss, Small, check, in_parts

EXPERTS, COPIES = 3, 2
Ends = Callable[[Tensor], Tensor]


def ends(ids: Tensor) -> Tensor:
    """The last row of each expert, of sorted numbers of experts."""
    counts = torch.histc(ids.double(), bins=EXPERTS, min=0, max=EXPERTS - 1)
    return counts.cumsum(0).to(torch.int32)


def ends_by_marks(ids: Tensor) -> Tensor:
    return torch.nn.functional.one_hot(ids, EXPERTS).sum(0).cumsum(0)


def experts(
    m: Small, z: Tensor, *, of: Ends = ends, copies: int = COPIES, descending: bool = False,
    mask: Ends | None = None,
) -> Tensor:  # fmt: skip
    """Each sample's rows by the experts that it chooses, weighed and added up."""
    chances, ids = z.softmax(1).topk(copies, 1)
    sorted_ids, order = ids.flatten().sort(descending=descending)
    rows = z[order // copies]
    weights = m.table.weight[:CLASSES].expand(EXPERTS, -1, -1) * m.vector[:, None, None]
    if mask is not None:
        rows = rows.masked_fill(mask(sorted_ids), 0.0)
    made = torch.ops.merakc.grouped_mm(rows, weights, of(sorted_ids))
    if mask is not None:
        made = made.masked_fill(mask(sorted_ids), 0.0)
    made = made.tanh() * chances.flatten()[order][:, None] + m.vector
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order))
    return made[back].view(len(z), copies, CLASSES).sum(1)


@pytest.mark.parametrize("copies", [1, COPIES])
@pytest.mark.parametrize("of", [ends, ends_by_marks])
def test_a_mixture_of_experts_makes_rows(of: Ends, copies: int) -> None:
    step = check(lambda m, z, b: (experts(m, z, of=of, copies=copies) * b["target"]).sum())
    assert step.loss.kind is Kind.SUM
    assert step.state("index").dims is not None
    assert step.state("index").dims[0][0] == SAMPLES  # type: ignore[index]
    (back,) = [n for n in step.graph.nodes if n.op == "aten.index_put.default"]
    counted = [n for n in step.graph.nodes if n.op == "aten.arange.default"]
    assert counted[-1].args[0] == copies * step.sizes[0]
    assert back.refs[-1].node == counted[-1].name


MASKS: dict[str, Ends] = {
    "of no expert": lambda ids: (ids >= EXPERTS).unsqueeze(-1),
    "of the last expert": lambda ids: ids.clamp(max=5).eq(EXPERTS - 1)[:, None],
}
OTHER_MASKS: dict[str, Ends] = {
    "of experts with many rows": lambda ids: (ends(ids)[ids] > 2)[:, None],
    "as many as there are": lambda ids: (ids == 0).sum() > 2,
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_rows_are_masked_by_their_own_expert(mask: Ends) -> None:
    step = check(lambda m, z, b: (experts(m, z, mask=mask) * b["target"]).sum())
    assert step.loss.kind is Kind.SUM


@pytest.mark.parametrize("mask", OTHER_MASKS.values(), ids=OTHER_MASKS)
def test_masks_by_other_rows_couple(mask: Ends) -> None:
    assert coupled(lambda m, z, b: (experts(m, z, mask=mask) * b["target"]).sum())


def coupled(forward: Loss, sizes: tuple[int, ...] = SIZES) -> bool:
    """Whether samples are coupled, exactly or refused: layers may stand behind what couples."""
    try:
        in_parts(forward, sizes=sizes)
    except RecordError as error:
        return "samples of the batch are coupled" in str(error)
    return check(forward, sizes=sizes).loss.kind is Kind.COUPLED


OTHER_ENDS: dict[str, Ends] = {
    "one group further": lambda ids: ends(ids).roll(1).clamp(max=4),
    "of those that fit": lambda ids: torch.histc(
        ids.double(), bins=EXPERTS, min=0, max=EXPERTS - 1).clamp(max=2).cumsum(0).to(torch.int32),
    "by the number of rows": lambda ids: (torch.arange(1, EXPERTS + 1) * len(ids) // EXPERTS),
    "by values": lambda ids: (ids[:EXPERTS] * 2).cumsum(0),
}  # fmt: skip


def test_a_capacity_that_the_whole_batch_alone_reaches_couples() -> None:
    """Parts of two samples have no expert with more than three rows; eight samples have."""

    def capped(ids: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(ids, EXPERTS).sum(0).clamp(max=3).cumsum(0)

    def loss(m: Small, z: Tensor, b: Batch) -> Tensor:
        return (experts(m, z, of=capped, copies=1) * b["target"]).sum()

    assert coupled(loss, sizes=(2, 2, 2, 2))


@pytest.mark.parametrize("name", OTHER_ENDS)
def test_groups_that_are_not_those_of_the_experts_are_no_rows(name: str) -> None:
    """Where a group ends decides for each row which expert it is given: of others, if not of it."""
    assert coupled(lambda m, z, b: (experts(m, z, of=OTHER_ENDS[name]) * b["target"]).sum())


def test_experts_from_the_last_on_do_not_end_where_those_from_the_first_do() -> None:
    assert coupled(lambda m, z, b: (experts(m, z, descending=True) * b["target"]).sum())


def sorted_rows(m: Small, z: Tensor) -> tuple[Tensor, Tensor]:
    order = z.argmax(1).argsort(stable=True)
    return z[order], order


NO_ROWS: dict[str, Loss] = {
    "added up in their order": lambda m, z, b: sorted_rows(m, z)[0].cumsum(0).sin().sum(),
    "beside rows": lambda m, z, b: (sorted_rows(m, z)[0] * b["target"]).sum(),
    "weighed by their place": lambda m, z, b: (
        sorted_rows(m, z)[0] * torch.arange(len(z))[:, None]).sum(),
    "the first of them": lambda m, z, b: sorted_rows(m, z)[0][:2].sum(),
    "the order": lambda m, z, b: (sorted_rows(m, z)[1] * m.other(b["x"])[:, 0]).sum(),
    "two sorts": lambda m, z, b: (
        sorted_rows(m, z)[0] * sorted_rows(m, m.other(b["x"]))[0]).sum(),
    "back by another sort": lambda m, z, b: (
        sorted_rows(m, z)[0][sorted_rows(m, m.other(b["x"]))[1]] * b["target"]).sum(),
}  # fmt: skip


@pytest.mark.parametrize("name", NO_ROWS)
def test_the_order_of_experts_itself_couples(name: str) -> None:
    assert check(NO_ROWS[name]).loss.kind is Kind.COUPLED


def put_back(m: Small, z: Tensor, b: Batch, *, added: bool) -> Tensor:
    rows, order = sorted_rows(m, z)
    places = torch.arange(len(order))
    back = torch.zeros_like(order).index_put((order,), places, accumulate=added)
    return (rows.sin()[back] * b["target"]).sum()


def test_rows_are_back_in_their_order_by_the_inverse_permutation() -> None:
    assert check(lambda m, z, b: put_back(m, z, b, added=False)).loss.kind is Kind.SUM
    assert check(lambda m, z, b: put_back(m, z, b, added=True)).loss.kind is Kind.COUPLED


def test_samples_that_are_taken_apart_and_put_together_are_rows() -> None:
    """As a model does with images of one size each; uneven parts take other paths."""
    sizes = (4, 4)
    stacked = check(lambda m, z, b: torch.stack(list(z.unbind())).square().sum(), sizes=sizes)
    assert stacked.loss.kind is Kind.SUM
    joined = check(lambda m, z, b: torch.cat(list(z[:, None].unbind())).square().sum(), sizes=sizes)
    assert joined.loss.kind is Kind.SUM


@pytest.mark.parametrize(
    "loss",
    [
        lambda m, z, b: (torch.stack(list(z.unbind())[::-1]) * b["target"]).sum(),
        lambda m, z, b: torch.stack(list(z.unbind()), 1).softmax(1).square().sum(),
        lambda m, z, b: z.unbind()[0].sum(),
    ],
)
def test_some_of_them_or_in_another_order_couple(loss: Loss) -> None:
    assert check(loss, sizes=(4, 4)).loss.kind is Kind.COUPLED
