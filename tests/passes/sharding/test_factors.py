"""Factors on their own: dividing, merging, regrouping, layouts."""

from __future__ import annotations

from merakc.passes.sharding.factors import (
    Factor,
    atoms,
    block,
    divide,
    layout,
    leaves,
    new_dim,
    piece,
    regroup,
    size,
    unify,
)


def sizes(dim: list[Factor]) -> list[int]:
    return [f.size for f in leaves(dim)]


def test_dims_of_one_have_no_factor() -> None:
    assert new_dim(1) == []
    assert size([]) == 1


def test_unify_divides_the_larger_factor() -> None:
    whole, parts = new_dim(24), [Factor(2), Factor(3), Factor(4)]
    unify(whole, parts)
    assert sizes(whole) == [2, 3, 4]
    assert leaves(whole) == leaves(parts)


def test_unify_of_dims_that_divide_differently_blocks_both() -> None:
    first, second = [Factor(4), Factor(6)], [Factor(6), Factor(4)]
    unify(first, second)
    assert all(f.blocked for f in leaves([*first, *second]))


def test_a_block_reaches_what_was_merged_and_what_it_was_divided_into() -> None:
    first, second = new_dim(6), new_dim(6)
    unify(first, second)
    block(second, "a reason")
    assert leaves(first)[0].blocked == "a reason"
    assert divide(leaves(first)[0], 2)
    assert [f.blocked for f in leaves(second)] == ["a reason", "a reason"]


def test_blocked_and_free_merge_to_blocked() -> None:
    first, second = new_dim(6), new_dim(6, "a reason")
    unify(first, second)
    assert leaves(first)[0].blocked == "a reason"


def test_regroup_splits_and_joins() -> None:
    heads = [Factor(2), Factor(5)]
    found = regroup([heads, new_dim(12)], (10, 3, 4))
    assert found is not None
    assert [sizes(d) for d in found] == [[2, 5], [3], [4]]
    back = regroup(found, (10, 12))
    assert back is not None
    assert [sizes(d) for d in back] == [[2, 5], [3, 4]]


def test_regroup_refuses_what_does_not_divide() -> None:
    assert regroup([[Factor(3), Factor(4)]], (2, 6)) is None
    assert regroup([[Factor(3)], [Factor(0)]], (0,)) is None  # nothing divides it


def test_layout_joins_neighbours_that_are_not_split() -> None:
    a, b, c = Factor(3), Factor(4), Factor(5)
    assert str(layout([[a, b, c], []], (60, 1), {b})) == "3·4*·5 x 1"
    assert str(layout([[a, b, c]], (60,), {c})) == "12·5*"
    assert str(layout([[a, b, c]], (60,), set())) == "60"


def test_a_cut_dim_becomes_a_row_of_segments() -> None:
    packed = new_dim(16)
    first, rest = piece(packed, 0, 8), piece(packed, 8, 16)
    assert first is not None
    assert rest is not None
    last = piece(packed, 12, 16)
    assert last is not None
    assert sizes(packed) == [16]
    assert [f.size for f in atoms(packed)] == [8, 4, 4]
    assert atoms(rest)[1] is atoms(last)[0]
    assert piece(packed, 4, 12) is not None
    assert [f.size for f in atoms(packed)] == [4, 4, 4, 4]


def test_cut_dims_merge_segment_by_segment() -> None:
    first, second, third = new_dim(12), new_dim(12), new_dim(12)
    piece(first, 0, 8)
    piece(second, 0, 4)
    unify(first, second)
    unify(third, first)
    assert [f.size for f in atoms(first)] == [4, 4, 4]
    assert atoms(first) == atoms(second) == atoms(third)
    block(second, "a reason")
    assert all(f.blocked for f in atoms(third))


def test_a_divided_dim_is_not_cut() -> None:
    heads = [Factor(3), Factor(4)]
    assert piece(heads, 0, 5) is None
    assert piece(heads, 0, 12) is not None
    packed = new_dim(12)
    piece(packed, 0, 5)
    assert regroup([packed], (3, 4)) is None
    unify(packed, heads)
    assert all(f.blocked for f in atoms([*packed, *heads]))


def test_the_layout_of_segments() -> None:
    packed = new_dim(16)
    queries, keys = piece(packed, 0, 12), piece(packed, 12, 16)
    assert queries is not None
    assert keys is not None
    heads = Factor(2)
    unify(queries, [heads, Factor(6)])
    unify(keys, [heads, Factor(2)])
    assert str(layout([packed], (16,), {atoms(keys)[0]})) == "(2*·6+2*·2)"
    assert str(layout([packed], (16,), set())) == "16"
