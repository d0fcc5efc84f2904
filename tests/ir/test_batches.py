from __future__ import annotations

import pytest
import torch

from merakc.ir.batches import BatchLayout, Rows

# Dim 1 holds two views of the samples, each of three tokens.
VIEWS = Rows(1, 2, 3)


@pytest.mark.parametrize("rows", [Rows(), Rows(1), VIEWS, Rows(1, 1, 3), Rows(0, 2)])
def test_parts_are_joined_as_they_were_taken(rows: Rows) -> None:
    shape = rows.sized((2, 6), 5)
    value = torch.arange(10 * 36.0)[: torch.Size(shape).numel()].view(shape)
    assert rows.samples(shape) == 5
    parts = [rows.take(value, first, count) for first, count in ((0, 2), (2, 2), (4, 1))]
    assert [tuple(p.shape) for p in parts] == [rows.sized(shape, n) for n in (2, 2, 1)]
    assert torch.equal(rows.join(parts), value)


def test_samples_stand_between_what_is_outside_and_inside() -> None:
    view, sample, token = torch.meshgrid(*map(torch.arange, (2, 4, 3)), indexing="ij")
    samples = sample.reshape(1, -1)
    assert VIEWS.take(samples, 1, 2).tolist() == [[1, 1, 1, 2, 2, 2] * 2]
    assert VIEWS.take(view.reshape(1, -1), 1, 2).tolist() == [[0] * 6 + [1] * 6]
    assert VIEWS.take(token.reshape(1, -1), 3, 1).tolist() == [[0, 1, 2] * 2]


def test_the_layout_of_uneven_ranks() -> None:
    layouts = [BatchLayout((8, 4), 2, dp) for dp in (0, 1)]
    assert [layout.each for layout in layouts] == [4, 2]
    assert [[layout.first(j) for j in (0, 1)] for layout in layouts] == [[0, 4], [8, 10]]
    assert sum(2 * layout.share for layout in layouts) == pytest.approx(1)
    assert (layouts[0].total, layouts[0].parts) == (12, 4)
