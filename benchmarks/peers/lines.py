"""What a user writes for a contestant: its adapter's lines that a plain loop does not have.

Read from the source: the statements of `build` and of what it uses from its own and sibling
modules, as they are formatted here. Left out are docstrings and comments, what only serves the
comparison (`weights`, the `Contestant`, `benchmarks.peers.training`), branches that this training
does not take, and lines that stand in the plain loop, `one_process`, too. An import is one line.
"""

from __future__ import annotations

import ast
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.peers.training import Training

FOLDER = Path(__file__).parent
PLAIN = "one_process"
PREFIX = "benchmarks.peers."
FREE = ("__future__", "typing", "collections.abc", f"{PREFIX}training")
# `cut` and `head_layers`: a user writes the numbers of layers.
HARNESS = frozenset(
    ("weights", "whole", "original_name", "gathered", "contestant_of", "Fed", "_Nothing", "cut",
     "head_layers")
)  # fmt: skip


def user_lines(peer: str, training: Training, form: str) -> int:
    """Lines that a user adds to the plain loop, or changes in it."""
    found, plain = _Reading(training, form), _Reading(training, form)
    found.read(peer, "build")
    plain.read(PLAIN, "build")
    return sum((Counter(found.lines) - Counter(plain.lines)).values())


class _Reading:
    """Collects the lines of a function and of all that it uses."""

    def __init__(self, training: Training, form: str) -> None:
        self.training, self.form = training, form
        self.lines: list[str] = []
        self.seen: set[tuple[str, str]] = set()

    def read(self, module: str, name: str) -> None:
        """A name of a module, once."""
        if (module, name) in self.seen or name in HARNESS:
            return
        self.seen.add((module, name))
        tree, text = _parsed(module)
        for node in tree.body:
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                self._read_import(node, name)
            elif name in _defined(node):
                used: set[str] = set()
                if name == "build" and isinstance(node, ast.FunctionDef):
                    self._read_all(node.body, text, used)
                else:
                    self._read_all([node], text, used)
                for each in sorted(used):
                    self.read(module, each)

    def _read_import(self, node: ast.Import | ast.ImportFrom, name: str) -> None:
        names = {alias.asname or alias.name.split(".")[0] for alias in node.names}
        source = node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
        if name not in names or source is None or source in FREE:
            return
        if source.startswith(PREFIX):
            self.read(source.removeprefix(PREFIX), name)
        line = ast.unparse(node)
        if not source.startswith(PREFIX) and line not in self.lines:
            self.lines.append(line)

    def _read_all(self, body: list[ast.stmt], text: list[str], used: set[str]) -> None:
        for node in body:
            self._read_statement(node, text, used)

    def _read_statement(self, node: ast.stmt, text: list[str], used: set[str]) -> None:
        if _is_docstring(node) or _is_harness(node):
            return
        taken = self._taken(node) if isinstance(node, ast.If) else None
        if taken is not None:
            assert isinstance(node, ast.If)
            self._read_all(node.body if taken else node.orelse, text, used)
            return
        inner: list[ast.stmt] = getattr(node, "body", [])
        last = inner[0].lineno - 1 if inner else node.end_lineno or node.lineno
        self.lines += [
            line for line in map(str.strip, text[node.lineno - 1 : last]) if _counts(line)
        ]
        kept = [x for x in ast.iter_child_nodes(node) if x not in inner]
        used |= {n.id for x in kept for n in ast.walk(x) if isinstance(n, ast.Name)}
        self._read_all(inner, text, used)

    def _taken(self, node: ast.If) -> bool | None:
        """Whether a branch over the degrees or the form is; None for others."""
        test = ast.unparse(node.test)
        if test.startswith(("training.", "form ")):
            return bool(eval(test, {"training": self.training, "form": self.form}))
        return None


@cache
def _parsed(module: str) -> tuple[ast.Module, list[str]]:
    text = (FOLDER / f"{module}.py").read_text()
    return ast.parse(text), text.splitlines()


def _defined(node: ast.stmt) -> set[str]:
    """What a statement of a module gives a name."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return {node.name}
    targets: list[Any] = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign):
        targets = [node.target]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _is_harness(node: ast.stmt) -> bool:
    if isinstance(node, ast.FunctionDef):
        return node.name in HARNESS
    return isinstance(node, ast.Return) and "contestant" in ast.unparse(node).lower()


def _counts(line: str) -> bool:
    return bool(line) and not line.startswith("#")
