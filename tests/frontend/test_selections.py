"""Rows and elements that a mask of the batch chooses, for any number of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from merakc.errors import RecordError
from merakc.frontend.record import record
from merakc.kernels.opaque import OPAQUE
from tests.frontend.against_eager import check, inputs_of, run_eager, run_graph, same
from tests.frontend.small import Small, linear, randn

LABELS = torch.tensor([[2, -100, 0], [-100, -100, -100], [5, 3, -100], [-100, 1, 1]])
OTHERS = torch.tensor([[-100, 1, -100], [0, 1, 4], [-100, -100, -100], [5, -100, 2]])  # six too
FEWER = LABELS.where(LABELS > 1, -100)
ALL = torch.arange(12).reshape(4, 3) % 6


def by_mask(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z[y != -100], y[y != -100])


def summed_with_weights(z: Tensor, y: Tensor) -> Tensor:
    mask, weight = y >= 0, torch.arange(1.0, 7.0, dtype=z.dtype)
    return F.cross_entropy(z[mask], y[mask], weight=weight, reduction="sum")


def smooth_and_weighted(z: Tensor, y: Tensor) -> Tensor:
    mask, weight = y >= 0, torch.arange(1.0, 7.0, dtype=z.dtype)
    return F.cross_entropy(z[mask], y[mask], weight=weight, label_smoothing=0.1, ignore_index=2)


def by_view(z: Tensor, y: Tensor) -> Tensor:
    mask = y.view(-1) >= 0
    return F.nll_loss(z.log_softmax(-1).view(-1, 6)[mask], y.view(-1)[mask])


def by_places(z: Tensor, y: Tensor) -> Tensor:
    (places,) = (y.flatten() >= 0).nonzero(as_tuple=True)
    return F.cross_entropy(z.flatten(0, 1)[places], y.flatten()[places])


def by_index_select(z: Tensor, y: Tensor) -> Tensor:
    places = (y.flatten() >= 0).nonzero().squeeze(1)
    scores = z.flatten(0, 1).index_select(0, places)
    return F.cross_entropy(scores, y.flatten().index_select(-1, places))


LOSSES = [by_mask, summed_with_weights, smooth_and_weighted, by_view, by_places, by_index_select]


def each(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z[y >= 0], y[y >= 0], reduction="none").square().sum()


def of_two_masks(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z[y >= 0], y[y.flip(1) >= 0])


def written_since(z: Tensor, y: Tensor) -> Tensor:
    z = z * 1
    chosen = z[y >= 0]
    z += z.flip(0).square()
    return F.cross_entropy(chosen, y[y >= 0]) + z.mean()


def and_of_the_others(z: Tensor, y: Tensor) -> Tensor:
    mask = y >= 0
    scores, labels = z[mask], y[mask]
    other = mask.clone()
    other ^= True
    return F.cross_entropy(scores, labels) + z[other].square().sum()


def select_elements(z: Tensor, y: Tensor) -> Tensor:
    mask = (y >= 0)[..., None] & (torch.arange(6) > 1)
    return (z.masked_select(mask) * torch.masked_select(z.sum(0), mask)).mean()


def select_rows(z: Tensor, y: Tensor) -> Tensor:
    scores = z.masked_select((y >= 0)[..., None]).view(-1, 6)
    return F.cross_entropy(scores, y.masked_select(y >= 0))


def select_by_bytes(z: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(z[..., 0][y > -1], y[(y >= 0) & (y > -1)] * 1.0 + z[y > -1].mean(1))


def normalised(z: Tensor, y: Tensor) -> Tensor:
    return F.normalize(z[y >= 0], dim=-1).sum(0).norm()


OTHER_FORMS = [each, of_two_masks, written_since, and_of_the_others, select_elements,
               select_rows, select_by_bytes, normalised]  # fmt: skip


def model_of(loss: Any) -> Small:
    torch.manual_seed(0)
    return Small(lambda s, x, y: loss(s.layer(x), y), layer=linear())


@pytest.mark.parametrize("loss", LOSSES + OTHER_FORMS)
def test_one_graph_for_any_number_of_places(loss: Any) -> None:
    model, x = model_of(loss), randn(4, 3, 6)
    recording = check(model, x, LABELS, relative=1e-12)
    assert recording.reads is None
    regions = [n for n in recording.graph.nodes if n.op == OPAQUE]
    assert bool(regions) == (loss in OTHER_FORMS)
    for labels in (OTHERS, FEWER, ALL):
        batch = x, labels
        if loss is of_two_masks and labels is FEWER:
            continue
        found = run_graph(recording.graph, inputs_of(recording.graph, model, batch, {}))
        same(found, run_eager(model, batch, {}), model, 1e-12)


def test_a_loss_of_nothing_chosen_is_no_number() -> None:
    model, batch = model_of(by_mask), (randn(4, 3, 6), torch.full((4, 3), -100))
    recording = record(model, (randn(4, 3, 6), LABELS), {})
    found = run_graph(recording.graph, inputs_of(recording.graph, model, batch, {}))
    assert found.outputs["output"].isnan()
    assert model(*batch).isnan()


def test_places_that_are_not_all_or_in_another_order_are_as_they_are() -> None:
    def forward(s: Any, x: Tensor, y: Tensor) -> Tensor:
        z, places = s.layer(x)[:, 0], (y[:, 0] >= 0).nonzero()
        one, back = places.select(0, 0), places.flip(0).squeeze(1)
        return F.cross_entropy(z[one], y[:, 0][one]) + F.cross_entropy(
            z[back], y[:, 0][places.squeeze(1)]
        )

    check(Small(forward, layer=linear()), randn(4, 3, 6), LABELS, relative=1e-12)


def token(s: Any, x: Tensor) -> Tensor:
    """Rows that one parameter replaces, as where words are hidden."""
    z = s.layer(x) * 1
    z[x[..., 0] > 0] = s.token
    return z


def added(s: Any, x: Tensor) -> Tensor:
    places = (None, (x[0, :, 0] > 0).to(torch.uint8))
    return torch.ops.aten.index_put(s.layer(x), places, s.token[None], accumulate=True)


def of_values(s: Any, x: Tensor) -> Tensor:
    """The mean, wherever another value is large; into a view."""
    z = s.layer(x) * 1
    z[:, 1][z[:, 1] > 0.1] = z.mean()
    return z


@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
@pytest.mark.parametrize("write", [token, added, of_values])
def test_a_write_by_a_mask_of_values_with_a_gradient(write: Any) -> None:
    torch.manual_seed(0)
    model = Small(
        lambda s, x: write(s, x).square().mean(), layer=linear(), token=nn.Parameter(randn(6))
    )
    recording = check(model, randn(4, 3, 6), relative=1e-12)
    other = (randn(4, 3, 6) * 2,)
    found = run_graph(recording.graph, inputs_of(recording.graph, model, other, {}))
    same(found, run_eager(model, other, {}), model, 1e-12)


def test_a_write_of_as_many_values_as_a_mask_chooses_is_refused_where_it_is_differentiated() -> (
    None
):
    def forward(s: Any, x: Tensor) -> Tensor:
        z = s.layer(x) * 1
        z[x[:, 0] > 0] = s.layer(x[:2])
        return z.mean()

    x = randn(4, 6)
    x[:, 0] = torch.tensor([1.0, -1.0, 1.0, -1.0])
    with pytest.raises(RecordError, match=r"test_selections.py.* written by a mask"):
        check(Small(forward, layer=linear()), x)
