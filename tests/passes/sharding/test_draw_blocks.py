"""A rank's part of a draw is the elements that it has, whichever way the array is written."""

from __future__ import annotations

import math

import pytest
import torch

from merakc.errors import ShardError
from merakc.passes.sharding.draw_blocks import refined


@pytest.mark.parametrize(
    ("sizes", "sample", "blocks", "expected"),
    [
        ((2, 60), 0, [(2, 0, 2), (3, 0, 3), (4, 2, 4), (5, 0, 5)], 0),
        ((60, 2), 1, [(3, 0, 3), (4, 2, 4), (5, 0, 5), (2, 0, 2)], 3),
        ((6, 4, 5), 1, [(3, 1, 3), (8, 0, 8), (5, 0, 5)], 2),
        ((4, 6), 0, [(2, 0, 2), (2, 0, 2), (6, 3, 6)], 0),
        ((120,), -1, [(4, 0, 4), (30, 5, 10)], -1),
        ((1, 24), 0, [(24, 0, 12)], 0),
        ((2, 8, 3), 1, [(16, 8, 16), (3, 0, 3)], 1),  # of two views, one on each rank
        ((4, 8), 1, [(32, 8, 24)], 1),
        ((4, 8), 1, [(32, 8, 8)], 1),
        ((6, 4, 5), 0, [(6, 0, 6), (20, 6, 9)], 0),
    ],
)
def test_blocks_are_refined_to_show_the_samples(
    sizes: tuple[int, ...], sample: int, blocks: list[tuple[int, int, int]], expected: int
) -> None:
    at, found = refined(sizes, sample, blocks)
    assert at == expected
    assert sample < 0 or found[at] == (sizes[sample], 0, sizes[sample])

    def elements(blocks: list[tuple[int, int, int]]) -> torch.Tensor:
        full = torch.arange(math.prod(size for size, _, _ in blocks))
        part = full.view([size for size, _, _ in blocks])
        return part[tuple(slice(start, end) for _, start, end in blocks)].flatten()

    assert torch.equal(elements(found), elements(blocks))


def test_draws_that_are_cut_in_their_midst_are_refused() -> None:
    with pytest.raises(ShardError, match="cuts random draws of 8 numbers each at 4 and 12"):
        refined((2, 8), 1, [(16, 4, 12)])
