"""Parts of a batch, written: masks that are filled, and copies for each sample."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from merakc.errors import RecordError
from tests.passes.batches.modules import compare

LENGTH, WIDTH = 4, 3


class Filled(nn.Module):
    """Texts in whose places the features of an image stand, two for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Linear(5, 2 * WIDTH, dtype=torch.float64)
        self.words = nn.Parameter(torch.ones(LENGTH, WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor, mask: Tensor) -> dict[str, Tensor]:
        """`x` [n, 5], `mask` [n, LENGTH]."""
        texts = self.words.expand(len(x), LENGTH, WIDTH)
        features = self.image(x).reshape(-1, WIDTH)
        filled = texts.masked_scatter(mask.unsqueeze(-1), features)
        return {"loss": (filled * torch.arange(LENGTH)[:, None]).pow(2).mean()}


def _batch(rows: list[list[int]]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(len(rows), 5, dtype=torch.float64, generator=generator)
    return {"x": x, "mask": torch.tensor(rows, dtype=torch.bool)}


@pytest.mark.parametrize("parts", [2, 4])
def test_values_are_put_into_the_places_of_their_own_samples(parts: int) -> None:
    rows = [[1, 1, 0, 0], [0, 1, 1, 0], [1, 0, 0, 1], [0, 0, 1, 1]]
    split = compare(Filled(), _batch(rows), parts)
    assert split.head is None


def test_a_part_with_places_for_the_values_of_another_is_refused() -> None:
    rows = [[1, 1, 1, 0], [0, 1, 1, 1], [1, 0, 0, 0], [0, 0, 1, 0]]
    with pytest.raises(RecordError, match="has 6 places, and values for 4"):
        compare(Filled(), _batch(rows), 2)


class Heads(nn.Module):
    """A table that is copied for each sample and each of its two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(1, WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """`x` [n, 2, WIDTH]."""
        copies = self.table.expand(2 * len(x), WIDTH)
        return {"loss": (x.flatten(0, 1) * copies).pow(2).mean()}


def test_copies_may_be_several_for_each_sample() -> None:
    split = compare(Heads(), {"x": torch.randn(4, 2, WIDTH, dtype=torch.float64)}, 2)
    assert split.head is None
