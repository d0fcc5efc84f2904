"""The factors of dims, and where samples stand among them."""

from __future__ import annotations

import pytest
import torch

from merakc.ir.batches import Rows
from merakc.ir.graph import Node, Ref, TensorSpec
from merakc.passes.batches.states import (
    SAMPLES,
    Dim,
    Kind,
    State,
    by_size,
    coupled,
    ends,
    every,
    plain,
    size,
    sums,
)

NODE = Node(
    "y", "aten.max.dim", (Ref("x"), 1), (),
    (TensorSpec((3,), torch.float64), None, TensorSpec((3, 4), torch.int64)), source="model.py:7",
)  # fmt: skip


@pytest.mark.parametrize(
    ("dim", "outside", "inside", "total"),
    [((SAMPLES,), 1, 1, 5), ((2, SAMPLES), 2, 1, 10), ((2, SAMPLES, 3, 4), 2, 12, 120)],
)
def test_what_stands_around_the_samples(dim: Dim, outside: int, inside: int, total: int) -> None:
    assert ends(dim) == (outside, inside)
    assert size(dim, 5) == total


def test_rows_are_where_one_dim_has_the_samples() -> None:
    assert State(Kind.ROWS, ((4,), (2, SAMPLES, 3))).rows == Rows(1, 2, 3)
    assert State(Kind.ROWS, ((SAMPLES,), (SAMPLES,))).rows is None
    assert State(Kind.CONSTANT, plain((4, 1))).rows is None
    assert State(Kind.COUPLED).rows is None
    assert not State(Kind.COUPLED).sampled
    assert State(Kind.ROWS, ((SAMPLES,),)).sampled


def spec(*shape: int) -> TensorSpec:
    return TensorSpec(shape, torch.float64)


def test_dims_by_the_shapes_of_two_recordings() -> None:
    assert by_size(spec(3, 4), spec(8, 4), 3, 8) == ((SAMPLES,), (4,))
    assert by_size(spec(3, 3), spec(8, 3), 3, 8) == ((SAMPLES,), (3,))
    assert by_size(spec(3, 3), spec(8, 8), 3, 8) == ((SAMPLES,), (SAMPLES,))
    assert by_size(spec(6), spec(16), 3, 8) == ((SAMPLES, 2),)
    assert by_size(spec(2), spec(7), 3, 8) is None
    assert by_size(spec(3), spec(8, 1), 3, 8) is None


def test_states_are_for_the_outputs_that_are_there() -> None:
    assert every(NODE, State(Kind.ROWS)) == (State(Kind.ROWS), None, State(Kind.ROWS))
    first, none, last = sums(NODE, scaled=True).states
    assert first == State(Kind.SUM, ((3,),))
    assert none is None
    assert last == State(Kind.SUM, ((3,), (4,)))
    (state, *_) = coupled(NODE, "samples meet").states
    assert state == State(Kind.COUPLED, why="model.py:7: max: samples meet")
