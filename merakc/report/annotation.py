"""The nodes that take longest, and the user's source with what its lines became."""

from __future__ import annotations

import ast
import linecache
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from merakc.ir.report import NodeTimes, SourceFile, SourceLine
from merakc.report.attribution import Attribution

MOST_LAYOUTS = 3  # of one line
MOST_LETTERS = 160  # of a line's text


def top_nodes(found: Attribution, most: int) -> tuple[NodeTimes, ...]:
    """The kinds of node that take longest."""
    total_s = sum(found.step_seconds.values()) or 1.0
    return tuple(
        NodeTimes(
            kind.module, kind.op, short_source(kind.source), layout=kind.layout,
            count=found.counts[kind],
            seconds=seconds, share=seconds / total_s,
        )
        for kind, seconds in list(found.step_seconds.items())[:most]
    )  # fmt: skip


def source_files(found: Attribution) -> tuple[SourceFile, ...]:
    """Every file whose lines made nodes, the one that takes longest first.

    Nodes without a line are in a file without a name, at line 0.
    """
    total_s = sum(found.step_seconds.values()) or 1.0
    shares: dict[tuple[str, int], float] = {}
    layouts: dict[tuple[str, int], dict[str, None]] = {}
    counts: Counter[tuple[str, int]] = Counter()
    for kind, seconds in found.step_seconds.items():
        at = _place(kind.source)
        shares[at] = shares.get(at, 0.0) + seconds / total_s
        layouts.setdefault(at, {})[kind.layout] = None
        counts[at] += found.counts[kind]
    files: dict[str, float] = {}
    for (path, _), share in shares.items():
        files[path] = files.get(path, 0.0) + share
    result = []
    for path in sorted(files, key=lambda p: -files[p]):
        functions = _functions(path)
        lines = []
        for number in sorted(n for p, n in shares if p == path):
            at = path, number
            few = tuple(layouts[at])
            few = few if len(few) <= MOST_LAYOUTS else (*few[:MOST_LAYOUTS], "...")
            text = linecache.getline(path, number).strip()[:MOST_LETTERS]
            function = _function_at(functions, number)
            lines.append(SourceLine(number, function, text, few, counts[at], shares[at]))
        result.append(SourceFile(short_path(path), tuple(lines)))
    return tuple(result)


def short_source(source: str) -> str:
    """`file:line` with the path as an import would find it, or from the working folder."""
    path, number = _place(source)
    return f"{short_path(path)}:{number}" if path else ""


def short_path(path: str) -> str:
    """The path from the nearest entry of `sys.path`, where it lies in one."""
    folders = [Path(entry) for entry in (*sys.path, "")]
    entries = {e for folder in folders for e in (folder.absolute(), folder.resolve())}
    inside = [e for e in entries & set(Path(path).parents) if e != Path(e.anchor)]
    nearest = max(inside, key=lambda e: len(e.parts), default=None)
    return str(Path(path).relative_to(nearest)) if nearest else path


def _place(source: str) -> tuple[str, int]:
    path, _, number = source.rpartition(":")
    return (path, int(number)) if path and number.isdigit() else ("", 0)


def _functions(path: str) -> list[tuple[int, int, str]]:
    """First and last line and name of every class and function of a file, outer ones first."""
    try:
        tree = ast.parse("".join(linecache.getlines(path)))
    except (SyntaxError, ValueError):
        return []
    found: list[tuple[int, int, str]] = []

    def visit(body: Iterable[ast.AST], prefix: str) -> None:
        for node in body:
            name = prefix
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                name = f"{prefix}{node.name}."
                found.append((node.lineno, node.end_lineno or node.lineno, name[:-1]))
            visit(ast.iter_child_nodes(node), name)

    visit(tree.body, "")
    return found


def _function_at(functions: Sequence[tuple[int, int, str]], number: int) -> str:
    """The innermost one around a line."""
    return next((name for first, last, name in reversed(functions) if first <= number <= last), "")
