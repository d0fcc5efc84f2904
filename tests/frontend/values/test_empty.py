"""Questions whether a mask chooses rows."""

from __future__ import annotations

import pytest
import sympy
import torch

from merakc.frontend.values.empty import Question, question_of
from merakc.frontend.values.idle import Known
from merakc.frontend.values.symbols import Answer, Number
from merakc.ir.graph import Node, Ref, TensorSpec

ROWS = sympy.Symbol("u0", integer=True, nonnegative=True)
ASKED = [
    (sympy.Eq(ROWS, 0), (True, False)),
    (sympy.Ne(4 * ROWS, 0), (False, True)),
    (sympy.Gt(ROWS, 0), (False, True)),
    (sympy.Lt(ROWS, 1), (True, False)),
    (sympy.Ge(ROWS, 1), (False, True)),
    (sympy.Lt(ROWS, 2), None),
    (sympy.Eq(ROWS, 1), None),
    (sympy.Eq(ROWS * ROWS, 0), None),
    (sympy.Eq(sympy.Mod(ROWS, 2), 0), None),
    (sympy.Gt(ROWS, 3 - ROWS), None),
    (ROWS, None),
]


def _known() -> Known:
    def node(name: str, op: str, of: str, *shape: int, dtype: torch.dtype = torch.bool) -> Node:
        return Node(name, op, (Ref(of),), (), (TensorSpec(shape, dtype),))

    nodes = [
        node("scores", "aten.sigmoid.default", "x", 4, dtype=torch.float64),
        node("mask", "aten.isfinite.default", "scores", 4),
        node("flat", "aten.reshape.default", "mask", 4),
        node("places", "aten.nonzero.default", "flat", 1, 1, dtype=torch.int64),
        node("truth", "aten.any.default", "mask"),
        node("sum", "aten.sum.default", "scores", dtype=torch.float64),
    ]
    return Known((), nodes, {})


@pytest.mark.parametrize(("truth", "answers"), ASKED)
def test_a_question_is_of_zero_or_not(
    truth: sympy.Basic, answers: tuple[Answer, Answer] | None
) -> None:
    found = question_of(Number(truth), _known(), (Ref("places"), 0))
    assert found == (None if answers is None else Question(Ref("mask"), *answers))


def test_it_is_of_a_mask() -> None:
    known, truth = _known(), Number(sympy.Ne(ROWS, 0))
    assert question_of(truth, known, (Ref("truth"), None)) == Question(Ref("mask"), False, True)
    assert question_of(truth, known, (Ref("places"), 1)) is None  # which is how many dims
    assert question_of(truth, known, (Ref("sum"), None)) is None  # of what may cancel out
    assert question_of(truth, known, (Ref("x"), None)) is None
