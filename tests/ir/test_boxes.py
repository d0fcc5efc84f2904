"""Every element of a tensor lies in one box of one rank's part."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from merakc.ir.boxes import part_boxes
from merakc.ir.layout import parse_layout
from merakc.runtime.part import Place

LAYOUTS = [
    "", "7*", "5 x 6*", "5* x 6", "3·4*·2 x 5", "4 x 3·5*·2", "(4*·2+2*·2+2*·2) x 3",
    "2 x 3* x 4", "1 x 8*", "2 x 2 x 3 x 5*", "3 x 4",
]  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(LAYOUTS), st.integers(1, 3), st.lists(st.integers(0, 60), max_size=3))
def test_boxes_are_the_elements_of_the_part(text: str, tp: int, cuts: list[int]) -> None:
    layout = parse_layout(text)
    whole = torch.arange(layout.numel, dtype=torch.float64).reshape(layout.shape)
    seen = torch.zeros_like(whole)
    for rank in range(tp if layout.is_split else 1):
        local = layout.take(whole, tp, rank).reshape(-1)
        bounds = sorted([0, local.numel(), *(min(c, local.numel()) for c in cuts)])
        for start, stop in pairwise(bounds):
            place, part = Place("w", layout, tp, rank, start, stop), local[start:stop].clone()
            assert torch.equal(place.take(whole), part)
            boxes = part_boxes(layout, tp, rank, start, stop)
            assert sum(torch.Size(b.sizes).numel() for b in boxes) == part.numel()
            for box in boxes:
                where = tuple(slice(a, a + n) for a, n in zip(box.starts, box.sizes, strict=True))
                assert torch.equal(whole[where], place.view(part, box))
                seen[where] += 1
    assert bool((seen == 1).all())


def test_neighbouring_elements_are_few_boxes() -> None:
    layout = parse_layout("3 x 8*")
    assert len(part_boxes(layout, 2, 0, 0, 12)) == 1
    assert [b.sizes for b in part_boxes(parse_layout("9 x 4"), 1, 0, 2, 31)] == [
        (1, 2), (6, 4), (1, 3),
    ]  # fmt: skip
