"""Checks that a model makes of its batch: `if ids.max() >= vocab: raise`, `assert mask.any()`.

A recording has no values, so no check can fail in it, and what follows a check is right for every
batch that passes. So where Python asks a tensor for its truth, and one of the two answers does
nothing but raise, the recorder gives the other.
"""

from __future__ import annotations

import ast
import functools
import inspect
import sys
import textwrap
from collections.abc import Iterator
from types import CodeType, FrameType

import torch

_FRONTEND = __file__.rpartition("/")[0]
_TORCH = torch.__file__.rpartition("/")[0]
# What stands between Python's question and the recorder: dispatch, and modes of the user's.
_BETWEEN = (
    _FRONTEND,
    *(
        f"{_TORCH}/{name}"
        for name in (
            "__init__.py",
            "_compile.py",
            "_dynamo/",
            "_ops.py",
            "_subclasses/",
            "fx/",
            "overrides.py",
            "utils/",
        )
    ),
)
_HOOKS = ("__torch_function__", "__torch_dispatch__")
# Parts of a test that ask for a tensor's truth themselves, and use it for something else.
_OTHER_USES = (
    ast.BoolOp, ast.IfExp, ast.Lambda, ast.NamedExpr, ast.ListComp, ast.SetComp, ast.DictComp,
    ast.GeneratorExp, ast.Not, ast.In, ast.NotIn, ast.List, ast.Await, ast.Yield,
)  # fmt: skip
_MESSAGES = ("print", "debug", "info", "warning", "warn", "error", "critical", "exception", "log")
_ASKING = ("all", "any", "bool", "filter", "max", "min", "sorted")


def harmless_answer() -> bool | None:
    """The truth with which the `if` or `assert` that is being decided does not raise.

    None where what asks is no such statement, or its source cannot be read.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_between(frame.f_code):
        frame = frame.f_back
    return _answers(frame.f_code).get(frame.f_lineno) if frame else None


def asks_whether_finite() -> bool:
    """Whether a number is wanted for `math.isnan` and its like alone, in the line that runs."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_between(frame.f_code):
        frame = frame.f_back
    return frame is not None and frame.f_lineno in _finite_lines(frame.f_code)


@functools.cache
def _finite_lines(code: CodeType) -> frozenset[int]:
    """The lines of tests in which all numbers go into questions of whether they are finite."""
    tree, first = _tree(code)
    found: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.If, ast.Assert)) and _only_asks_finite(node.test):
            last = node.test.end_lineno or node.test.lineno
            found |= set(range(first + node.test.lineno - 1, first + last))
    return frozenset(found)


def _only_asks_finite(test: ast.expr) -> bool:
    if isinstance(test, ast.BoolOp):
        return all(map(_only_asks_finite, test.values))
    if isinstance(test, ast.UnaryOp):
        return _only_asks_finite(test.operand)
    if not isinstance(test, ast.Call) or len(test.args) != 1:
        return False
    name = test.func.attr if isinstance(test.func, ast.Attribute) else getattr(test.func, "id", "")
    numbers = (ast.Attribute, ast.Name, ast.Call)
    simple = all(isinstance(n, (*numbers, ast.Load)) for n in ast.walk(test.args[0]))
    return name in ("isnan", "isinf", "isfinite") and simple


def _tree(code: CodeType) -> tuple[ast.AST, int]:
    """The source of some code, and its first line; nothing where it cannot be read."""
    try:
        lines, first = inspect.getsourcelines(code)
        return ast.parse(textwrap.dedent("".join(lines))), first
    except (OSError, SyntaxError):
        return ast.Module([], []), 1


def _is_between(code: CodeType) -> bool:
    return code.co_filename.startswith(_BETWEEN) or code.co_name in _HOOKS


@functools.cache
def _answers(code: CodeType) -> dict[int, bool]:
    """Line -> the answer to every question asked on it, for the lines of checks."""
    tree, first = _tree(code)
    found: dict[int, bool] = {}
    for test, fine in _checks(tree, guarded=False):
        answer = _answer(test, fine)
        if answer is not None:
            last = test.end_lineno or test.lineno
            found |= dict.fromkeys(range(first + test.lineno - 1, first + last), answer)
    return found


def _checks(node: ast.AST, *, guarded: bool) -> Iterator[tuple[ast.expr, bool]]:
    """The tests of statements that may raise, and whether they are to hold.

    Not those inside a `try`, where an exception may be a way to choose.
    """
    guarded = guarded or (isinstance(node, ast.Try) and bool(node.handlers))
    if not guarded and isinstance(node, ast.Assert):
        yield node.test, True
    if not guarded and isinstance(node, ast.If) and _only_tells(node.body):
        yield node.test, False
    for child in ast.iter_child_nodes(node):
        yield from _checks(child, guarded=guarded)


def _only_tells(body: list[ast.stmt]) -> bool:
    """Whether statements raise an exception, or warn and then raise one."""
    return isinstance(body[-1], ast.Raise) and all(map(_is_message, body[:-1]))


def _is_message(node: ast.stmt) -> bool:
    """Whether a statement writes text: `print(...)`, `logger.error(...)`, `warnings.warn(...)`."""
    if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Call):
        return False
    func = node.value.func
    name = func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "")
    return name in _MESSAGES


def _answer(test: ast.expr, wanted: bool) -> bool | None:
    """What every tensor in a test has to answer for the whole to be `wanted`; None if unclear."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _answer(test.operand, not wanted)
    if isinstance(test, ast.BoolOp):
        asking = [value for value in test.values if not _asks_nothing(value)]
        answers = {_answer(value, wanted) for value in asking}
        return answers.pop() if len(answers) == 1 else None
    for node in ast.walk(test):
        asks = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        if isinstance(node, _OTHER_USES) or (asks and node.func.id in _ASKING):  # type: ignore[attr-defined]
            return None
        if isinstance(node, (ast.Compare, ast.BinOp)) and _asks_by_item(node):
            return None
    return wanted


def _asks_by_item(part: ast.expr) -> bool:
    """Whether a part of a test is about what a call of `item` gives."""
    calls = (node.func for node in ast.walk(part) if isinstance(node, ast.Call))
    return any(isinstance(func, ast.Attribute) and func.attr == "item" for func in calls)


def _asks_nothing(part: ast.expr) -> bool:
    """Whether a part of a test is about no tensor's values: `self.training`, `x is not None`."""
    if isinstance(part, ast.Compare):
        return all(isinstance(op, (ast.Is, ast.IsNot)) for op in part.ops)
    return isinstance(part, ast.Attribute) and part.attr == "training"
