"""Layouts: which part of a tensor a tp rank holds."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from merakc.ir.layout import Axis, DimFactor, Layout, block_bounds, parse_layout

FACTORS = st.builds(DimFactor, st.integers(1, 6), st.booleans()) | st.builds(
    lambda size: DimFactor(size, True, on=0), st.integers(1, 6)
)
DIMS = st.lists(FACTORS, min_size=1, max_size=3).map(tuple)
LAYOUTS = st.builds(Layout, st.lists(DIMS, max_size=3).map(tuple)).filter(
    lambda layout: math.prod(layout.shape) <= 2000
)
# A tensor is split over one factor at a time: two would leave blocks that no rank holds.
SPLIT_ONCE = LAYOUTS.filter(lambda layout: sum(f.split for dim in layout.dims for f in dim) <= 1)
TP = st.integers(1, 5)


def _numbered(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(math.prod(shape)).reshape(shape)


@given(SPLIT_ONCE, TP)
def test_join_undoes_take(layout: Layout, tp: int) -> None:
    full = _numbered(layout.shape)
    parts = [layout.take(full, tp, rank) for rank in range(tp)]
    assert torch.equal(layout.join(parts), full)


@given(LAYOUTS, TP)
def test_take_gives_the_local_shape(layout: Layout, tp: int) -> None:
    full = _numbered(layout.shape)
    for rank in range(tp):
        assert tuple(layout.take(full, tp, rank).shape) == layout.local_shape(tp, rank)


@given(SPLIT_ONCE.filter(lambda layout: layout.is_split), TP)
def test_every_element_has_one_holder(layout: Layout, tp: int) -> None:
    full = _numbered(layout.shape)
    held = torch.cat([layout.take(full, tp, rank).reshape(-1) for rank in range(tp)])
    assert torch.equal(held.sort().values, full.reshape(-1))


def test_a_factor_may_be_whole_on_one_rank() -> None:
    layout = parse_layout("4@1 x 3")
    assert [layout.local_shape(3, rank) for rank in range(3)] == [(0, 3), (4, 3), (0, 3)]
    assert (str(layout), layout.is_split, layout.shape) == ("4@1 x 3", True, (4, 3))


@given(LAYOUTS)
def test_parse_undoes_str(layout: Layout) -> None:
    assert parse_layout(str(layout)) == layout


@given(st.integers(0, 40), st.integers(1, 9))
def test_blocks_are_those_of_tensor_split(size: int, parts: int) -> None:
    expected = torch.arange(size).tensor_split(parts)
    for index, block in enumerate(expected):
        start, end = block_bounds(size, parts, index)
        assert torch.equal(torch.arange(start, end), block)


def test_a_part_is_a_copy() -> None:
    full = torch.zeros(4)
    Layout(((DimFactor(4),),)).take(full, 1, 0).fill_(1)
    assert torch.equal(full, torch.zeros(4))


def test_packed_qkv_keeps_whole_heads_of_each_of_q_k_v() -> None:
    packed = parse_layout("2 x 3·4*·2")  # q, k, v; 4 heads of 2
    full = _numbered((2, 24))
    assert packed.shape == (2, 24)
    assert packed.local_shape(2, 0) == (2, 12)
    assert packed.take(full, 2, 1)[0].tolist() == [4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23]


SEGMENTS = parse_layout("(4*·2+2*·3+2*) x 3")  # the parts of one projection, split each by heads


@pytest.mark.parametrize("tp", [1, 2])
def test_segments_are_split_each_on_its_own(tp: int) -> None:
    assert SEGMENTS.shape == (16, 3)
    assert SEGMENTS.is_split
    full = _numbered((16, 3))
    parts = [SEGMENTS.take(full, tp, rank) for rank in range(tp)]
    assert [tuple(p.shape) for p in parts] == [SEGMENTS.local_shape(tp, r) for r in range(tp)]
    assert torch.equal(SEGMENTS.join(parts), full)
    if tp == 2:
        assert SEGMENTS.index(0, 2, 1).tolist() == [4, 5, 6, 7, 11, 12, 13, 15]


@given(LAYOUTS, TP)
def test_order_is_that_of_the_ranks_parts_one_behind_the_other(layout: Layout, tp: int) -> None:
    for dim in range(len(layout.dims)):
        sizes, order = layout.order(dim, tp)
        found = [layout.index(dim, tp, rank).tolist() for rank in range(tp)]
        assert list(sizes) == list(map(len, found))
        flat = [k for own in found for k in own]
        assert (order is None) == (flat == [*range(len(flat))])
        assert order is None or order.tolist() == flat


def test_segments_survive_their_text() -> None:
    for text in ("(4*·2+2*·3+2*) x 3", "2·(3*+(2*·5+1)·2)·4", "(1+2)"):
        assert str(parse_layout(text)) == text
        assert parse_layout(str(parse_layout(text))) == parse_layout(text)


def test_text_form() -> None:
    layout = Layout(((DimFactor(768),), (DimFactor(3), DimFactor(12, True), DimFactor(64))))
    assert str(layout) == "768 x 3·12*·64"
    assert str(Layout(())) == ""
    assert parse_layout("") == Layout(())


@pytest.mark.parametrize(("text", "split"), [("4 x 3·4*", True), ("4 x 3·4", False), ("", False)])
def test_is_split(text: str, split: bool) -> None:
    assert parse_layout(text).is_split is split


# Of two axes the ranks of one, 3 apart, split one dim, and the neighbours another.
FAR, NEAR = Axis(2, 3), Axis(3, 1)


@pytest.mark.parametrize(
    ("far", "near", "text"),
    [
        ("4* x 6 x 5", "4 x 2·3* x 5", "4*2/3 x 2·3*3 x 5"),
        ("5* x 6 x 5", "5 x 6 x 5*", "5*2/3 x 6 x 5*3"),  # uneven
        ("4 x 6 x 5", "4 x (3*+3*) x 5", "4 x (3*3+3*3) x 5"),
        ("4@1 x 6 x 5", "4 x 6* x 5", "4@1*2/3 x 6*3 x 5"),
        ("4 x 6 x 5", "4 x 6 x 5", "4 x 6 x 5"),
    ],
)
def test_two_axes_split_a_tensor(far: str, near: str, text: str) -> None:
    one, other = parse_layout(far), parse_layout(near)
    layout = one.crossed(other, 2, 3)
    assert (str(layout), parse_layout(text)) == (text, layout)
    for axis, alone in ((FAR, one), (NEAR, other)):
        for k, rank in product(range(3), range(axis.ranks)):
            found = layout.part(axis).index(k, axis.ranks, rank)
            assert torch.equal(found, alone.index(k, axis.ranks, rank))
    full = _numbered(layout.shape)
    parts = [layout.take(full, 6, rank) for rank in range(6)]
    for rank, part in enumerate(parts):
        dims = range(len(layout.dims))
        held = [{*one.index(k, 2, rank // 3).tolist()} for k in dims]
        own = [other.index(k, 3, rank % 3).tolist() for k in dims]
        index = [torch.tensor([*filter(h.__contains__, o)]) for h, o in zip(held, own, strict=True)]
        wanted = full[torch.meshgrid(*(i.long() for i in index), indexing="ij")]
        assert torch.equal(part, wanted)
        assert tuple(part.shape) == layout.local_shape(6, rank)
        assert torch.equal(part, parts[layout.holder(rank)])
    holders = {layout.holder(rank) for rank in range(6)}
    assert len(holders) * layout.copies(6) == 6
    assert torch.equal(layout.join(parts), full)


def test_a_part_on_one_rank_is_said_of_a_dim_that_the_other_axis_leaves() -> None:
    home = parse_layout("4@1 x 6")
    assert home.beside(parse_layout("4 x 6*")) is home
    assert str(home.beside(parse_layout("4* x 6"))) == "4 x 6@1"
    assert home.beside(parse_layout("4* x 6")).local_shape(2, 0) == (4, 0)


@pytest.mark.parametrize("text", ["8*2/4", "8*4 x 3", "8@1*2/4", "2·(3*2+5*2)·2"])
def test_axes_survive_their_text(text: str) -> None:
    assert str(parse_layout(text)) == text
    assert parse_layout(text).axes <= {Axis(2, 4), Axis(4, 1), Axis(2, 1)}


def test_who_has_a_part_first() -> None:
    assert [parse_layout("8*2/2 x 3").holder(r) for r in range(4)] == [0, 0, 2, 2]
    assert [parse_layout("8*2 x 3").holder(r) for r in range(4)] == [0, 1, 0, 1]
    assert [parse_layout("8* x 3").holder(r) for r in range(4)] == [0, 1, 2, 3]
    assert [parse_layout("8 x 3").holder(r) for r in range(4)] == [0, 0, 0, 0]
