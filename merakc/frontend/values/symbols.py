"""Numbers that a forward reads of its tensors, and sizes that follow from their values.

A forward that asks for either is recorded with symbols in their place: `x.sum().item()` is a symbol
that stands for the number, `x[mask]` has one for a size. What is computed with symbols is a
`Number` in the graph. Only where Python wants to know a number is there a question to answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from merakc.ir.graph import Ref

SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
ITEM = "aten._local_scalar_dense.default"
Answer = bool | int | float


@dataclass(frozen=True, slots=True, repr=False)
class Number:
    """A number that is known when a graph runs: an expression of symbols."""

    expression: sympy.Basic

    @property
    def symbols(self) -> list[str]:
        """The names of the symbols that it is computed from."""
        return sorted(str(s) for s in self.expression.free_symbols)

    @property
    def is_truth(self) -> bool:
        """Whether it is true or false."""
        return isinstance(self.expression, sympy.logic.boolalg.Boolean) and not isinstance(
            self.expression, sympy.Symbol
        )

    def value(self, symbols: Mapping[str, Answer]) -> Answer:
        """What it is where the symbols are these."""
        if isinstance(self.expression, sympy.Symbol):
            return symbols[self.expression.name]
        given = {s: symbols[str(s)] for s in self.expression.free_symbols}
        found: Answer = plain(sympy_interp(PythonReferenceAnalysis, given, self.expression))
        return found

    def __repr__(self) -> str:
        return str(self.expression)


class Symbols(ShapeEnv):
    """The symbols of one recording; `answer` is asked for a number that Python wants to know."""

    def __init__(self, answer: Callable[[Number], Answer]) -> None:
        super().__init__()
        self.answer = answer

    def evaluate_expr(self, orig_expr: Any, *args: Any, **kwargs: Any) -> Any:
        """What an expression is; torch's own rules come first."""
        try:
            return super().evaluate_expr(orig_expr, *args, **kwargs)
        except GuardOnDataDependentSymNode:
            return self.answer(Number(orig_expr))


def plain(value: Any) -> Any:
    """A number of torch's that no symbol is in, as one of Python's."""
    kinds = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
    return kinds.get(type(value), lambda x: x)(value)


def number(value: Any) -> Any:
    """A number of torch's as one of a graph; a size that is known as it is."""
    if not isinstance(value, SYMBOLIC):
        return value
    return Number(value.node.expr) if value.node.expr.free_symbols else plain(value)


def is_symbolic(value: Any) -> bool:
    """Whether there is a symbol among arguments or results, or in the shape of one."""
    if isinstance(value, torch.Tensor):
        return bool(value._has_symbolic_sizes_strides)
    if isinstance(value, (tuple, list)):
        return any(map(is_symbolic, value))
    if isinstance(value, dict):
        return any(map(is_symbolic, value.values()))
    return isinstance(value, SYMBOLIC)


def has_number(value: tuple[Any, ...]) -> bool:
    """Whether there is a `Number` in a nest of tuples."""
    for item in value:
        if isinstance(item, tuple):
            if type(item) is not Ref and has_number(item):
                return True
        elif isinstance(item, Number):
            return True
    return False


def numbers(value: Any) -> Iterator[Number]:
    """Every `Number` in a nest of tuples."""
    if isinstance(value, tuple):
        for item in value:
            yield from numbers(item)
    elif isinstance(value, Number):
        yield value
