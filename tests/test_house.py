"""The rules of the house (CONTRIBUTING.md), measured on the code. Each names all its offenders."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import grimp
import networkx as nx
import pytest
from importlinter.cli import lint_imports

ROOT = Path(__file__).resolve().parents[1]
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 50
MAX_POSITIONAL = 6
# Torch's own ops take theirs by position; the others are still to be gone through.
POSITIONAL = "kernels/", "merakc/frontend/calls/", "merakc/costs/", "merakc/train/"
MAX_ROOT_MODULES, MAX_ROOM_MODULES = 6, 20
MIRRORED_FROM_LINES = 21  # shorter modules hold names and constants: nothing to test by itself
MAY_PRINT = ("merakc/report/", "merakc/cli/app.py", "benchmarks/")
# A path that exists on one machine only: what a person's shell or a container's mount put in.
MACHINE_PATH = re.compile(r"(?<![\w.~)\]}*-])/(?:work|root|home|Users)/\w")

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Source:
    """A Python file: its path from the root, and its text."""

    path: str
    text: str

    @property
    def tree(self) -> ast.Module:
        return _parse(self.text)

    @property
    def lines(self) -> int:
        return len(self.text.splitlines())


@functools.cache
def _parse(text: str) -> ast.Module:
    return ast.parse(text)


@functools.cache
def _sources(*folders: str) -> tuple[Source, ...]:
    found = []
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            linked = any(parent.is_symlink() for parent in path.parents)
            if not linked:  # merakc/runtime and merakc/kernels are read as runtime and kernels
                found.append(Source(path.relative_to(ROOT).as_posix(), path.read_text()))
    return tuple(found)


def _calls(tree: ast.AST, name: str) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name:
            yield node


def long_files(source: Source) -> Iterator[str]:
    """Files of more than 400 lines."""
    if source.lines > MAX_FILE_LINES:
        yield f"{source.path}: {source.lines} lines, at most {MAX_FILE_LINES}"


def long_functions(source: Source) -> Iterator[str]:
    """Functions of more than 50 lines, from `def` to the last line, without the docstring."""
    for node in ast.walk(source.tree):
        if isinstance(node, FUNCTIONS) and node.end_lineno is not None:
            lines = node.end_lineno - node.lineno + 1
            if ast.get_docstring(node):  # one that names all arguments is as long as they are many
                lines -= (node.body[0].end_lineno or 0) - node.body[0].lineno + 1
            if lines > MAX_FUNCTION_LINES:
                where = f"{source.path}:{node.lineno} {node.name}"
                yield f"{where}: {lines} lines, at most {MAX_FUNCTION_LINES}"


def unnamed_arguments(source: Source) -> Iterator[str]:
    """Calls of our own functions with more than six arguments by position."""
    if source.path.startswith(POSITIONAL):
        return
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and len(node.args) > MAX_POSITIONAL:
            yield f"{source.path}:{node.lineno}: {ast.unparse(node.func)}: name some arguments"


def hidden_names(source: Source) -> Iterator[str]:
    """Names that come from nowhere: `global`, and imports of everything."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Global):
            yield f"{source.path}:{node.lineno}: global {', '.join(node.names)}"
        if isinstance(node, ast.ImportFrom) and any(a.name == "*" for a in node.names):
            yield f"{source.path}:{node.lineno}: from {node.module} import *"


def prints(source: Source) -> Iterator[str]:
    """`print` where no person is being talked to."""
    if not source.path.startswith(MAY_PRINT):
        for call in _calls(source.tree, "print"):
            yield f"{source.path}:{call.lineno}: print"


def catch_alls(source: Source) -> Iterator[str]:
    """Modules named after nothing."""
    if Path(source.path).stem in ("utils", "util"):
        yield f"{source.path}: name it after what it holds"


def open_values(source: Source) -> Iterator[str]:
    """Dataclasses of the intermediate representation that are not frozen and slotted."""
    if not source.path.startswith("merakc/ir/"):
        return
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ClassDef):
            for decorator in map(ast.unparse, node.decorator_list):
                if "dataclass" in decorator and not (
                    "frozen=True" in decorator and "slots=True" in decorator
                ):
                    yield f"{source.path}:{node.lineno} {node.name}: not frozen and slotted"


def bare_arguments(source: Source) -> Iterator[str]:
    """Arguments without an annotation."""
    for node in ast.walk(source.tree):
        if not isinstance(node, FUNCTIONS):
            continue
        a = node.args
        every = [*a.posonlyargs, *a.args, *a.kwonlyargs, *filter(None, (a.vararg, a.kwarg))]
        bare = [x.arg for x in every if x.annotation is None and x.arg not in ("self", "cls")]
        if bare:
            yield f"{source.path}:{node.lineno} {node.name}: {', '.join(bare)} not annotated"


def undocumented(source: Source) -> Iterator[str]:
    """Modules, and public functions, classes and methods, without a docstring."""
    if ast.get_docstring(source.tree) is None and source.text.strip():
        yield f"{source.path}: no docstring"

    def visit(body: list[ast.stmt], prefix: str) -> Iterator[str]:
        for node in body:
            if isinstance(node, (*FUNCTIONS, ast.ClassDef)) and not node.name.startswith("_"):
                if ast.get_docstring(node) is None:
                    yield f"{source.path}:{node.lineno} {prefix}{node.name}: no docstring"
                if isinstance(node, ast.ClassDef):
                    yield from visit(node.body, f"{prefix}{node.name}.")

    yield from visit(source.tree.body, "")


def mirror(path: str) -> str:
    """Where the tests of a module are: merakc/passes/stages/cut.py ->
    tests/passes/stages/test_cut.py.
    """
    place = Path(path.removeprefix("merakc/"))
    return Path("tests", place.parent, f"test_{place.name}").as_posix()


def untested(source: Source) -> Iterator[str]:
    """Modules without a test file of their name."""
    if Path(source.path).name == "__init__.py" or source.lines < MIRRORED_FROM_LINES:
        return
    if not (ROOT / mirror(source.path)).is_file():
        yield f"{source.path}: {mirror(source.path)} is missing"


PACKAGES = ("merakc", "runtime", "kernels")
CODE = (*PACKAGES, "benchmarks")
RULES: dict[Callable[[Source], Iterator[str]], tuple[str, ...]] = {
    long_files: CODE,
    long_functions: CODE,
    unnamed_arguments: PACKAGES,
    hidden_names: (*CODE, "tests"),
    prints: PACKAGES,
    catch_alls: (*CODE, "tests"),
    open_values: PACKAGES,
    bare_arguments: (*CODE, "tests"),
    undocumented: CODE,
    untested: PACKAGES,
}
OFFENCES: dict[Callable[[Source], Iterator[str]], Source] = {
    long_files: Source("merakc/x.py", "\n" * 401),
    long_functions: Source("merakc/x.py", "def f():\n" + "    pass\n" * 50),
    unnamed_arguments: Source("merakc/x.py", "f(1, 2, 3, 4, 5, 6, 7)"),
    hidden_names: Source("merakc/x.py", "from os import *"),
    prints: Source("merakc/passes/x.py", "print(1)"),
    catch_alls: Source("merakc/utils.py", ""),
    open_values: Source("merakc/ir/x.py", "@dataclass(frozen=True)\nclass X: ..."),
    bare_arguments: Source("merakc/x.py", "def f(*, a): ..."),
    undocumented: Source("merakc/x.py", '"""X."""\nclass X:\n    """X."""\n    def f(self): ...'),
    untested: Source("runtime/no_such_module.py", "\n" * 21),
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule(rule: Callable[[Source], Iterator[str]]) -> None:
    sources = _sources(*RULES[rule])
    assert sources
    offenders = [line for source in sources for line in rule(source)]
    assert not offenders, f"{rule.__doc__}\n" + "\n".join(offenders)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule_finds_an_offence(rule: Callable[[Source], Iterator[str]]) -> None:
    assert len(list(rule(OFFENCES[rule]))) == 1


def test_mirror() -> None:
    assert mirror("merakc/passes/stages/cut.py") == "tests/passes/stages/test_cut.py"
    assert mirror("merakc/simulation/simulate.py") == "tests/simulation/test_simulate.py"
    assert mirror("runtime/step.py") == "tests/runtime/test_step.py"


def crowded(paths: Iterable[str]) -> Iterator[str]:
    """Rooms of more modules than a person can look over."""
    counts = Counter(str(Path(p).parent) for p in paths if Path(p).name != "__init__.py")
    for room, count in counts.items():
        most = MAX_ROOT_MODULES if room == "merakc" else MAX_ROOM_MODULES
        if count > most:
            yield f"{room}: {count} modules, at most {most}"


def test_rooms() -> None:
    assert not list(crowded(source.path for source in _sources(*PACKAGES)))
    assert list(crowded(f"merakc/x{k}.py" for k in range(7))) == ["merakc: 7 modules, at most 6"]
    assert list(crowded(f"merakc/ir/x{k}.py" for k in range(21)))
    assert not list(crowded(f"merakc/ir/x{k}.py" for k in range(20)))


def test_imports_go_one_way(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(ROOT))
    code = lint_imports(config_filename=str(ROOT / "pyproject.toml"), no_cache=True)
    assert code == 0, capsys.readouterr().out


def test_no_import_cycle() -> None:
    # The linter's contract compares siblings; this one sees cycles through an __init__.py as well.
    graph = grimp.build_graph(
        "merakc", "merakc.kernels", exclude_type_checking_imports=True, cache_dir=None
    )
    edges = nx.DiGraph(
        (name, target)
        for name in graph.modules
        for target in graph.find_modules_directly_imported_by(name)
    )
    assert edges.has_edge("merakc.ir.plan_file", "merakc.errors")
    cycles = [sorted(c) for c in nx.strongly_connected_components(edges) if len(c) > 1]
    assert not cycles, "modules that import each other:\n" + "\n".join(map(" ".join, cycles))


def test_no_machine_path() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("needs the list of files that git keeps; this is no checkout")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    names = listed.stdout.strip("\0").split("\0")
    assert "pyproject.toml" in names
    offenders = []
    for name in names:
        path = ROOT / name
        if path.is_symlink() or not path.is_file():
            continue
        body = path.read_bytes()
        if b"\0" in body:
            continue
        for number, line in enumerate(body.decode(errors="replace").splitlines(), 1):
            if MACHINE_PATH.search(line):
                offenders.append(f"{name}:{number}: {line.strip()}")
    assert not offenders, "paths of one machine:\n" + "\n".join(offenders)


@pytest.mark.parametrize("folder", ["work", "root", "home", "Users"])
def test_machine_path_pattern(folder: str) -> None:
    assert MACHINE_PATH.search(f"see /{folder}/merakc/x.py")
    assert MACHINE_PATH.search(f'Path("/{folder}/x")')
    assert not MACHINE_PATH.search(f"https://example.org/{folder}/x")
    assert not MACHINE_PATH.search(f"tests/{folder}/x.py")
