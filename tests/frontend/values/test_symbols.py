"""Numbers of a graph: what they are computed from, and that Python semantics hold."""

from __future__ import annotations

import pytest
import sympy  # type: ignore[import-untyped]
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from merakc.frontend.values.symbols import Number, Symbols, is_symbolic, number, numbers, plain

U, V = sympy.Symbol("u", integer=True), sympy.Symbol("v", integer=True)


@pytest.mark.parametrize(
    ("expression", "value"),
    [(U, 7), (U + 2 * V, 13), (sympy.Ne(U, 0), True), (sympy.Eq(U, V), False), (U > V, True)],
)
def test_the_value_of_an_expression(expression: sympy.Basic, value: object) -> None:
    found = Number(expression).value({"u": 7, "v": 3})
    assert found == value
    assert type(found) is type(value)


def test_symbols_and_truths() -> None:
    assert Number(U + V).symbols == ["u", "v"]
    assert Number(sympy.Ne(U, 0)).is_truth
    assert not Number(U).is_truth
    assert list(numbers((1, (Number(U), "x"), Number(V)))) == [Number(U), Number(V)]


def test_what_torch_counts_becomes_a_number_and_a_question() -> None:
    asked: list[Number] = []

    def answer(question: Number) -> int:
        asked.append(question)
        return 5

    with FakeTensorMode(shape_env=Symbols(answer)):
        x = torch.ones(6)
        chosen = x[x > 0]
        assert is_symbolic(chosen)
        assert not is_symbolic((x, [2]))
        (size,) = chosen.shape
        assert isinstance(number(size), Number)
        assert int(size) == 5
    assert [q.symbols for q in asked] == [number(size).symbols]
    assert number(3) == 3
    assert plain(True) is True
