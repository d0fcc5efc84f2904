"""What every benchmark does beside measuring: options, progress, tables, files, the exit code."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from merakc.machines.garbage import few_collections, leave_garbage


def in_a_folder(path: Path | None) -> Path | None:
    """A path that can be written to when hours are over."""
    if path is not None and not path.absolute().parent.is_dir():
        raise typer.BadParameter(f"there is no folder {path.parent}; make it, or give another path")
    return path


JsonPath = Annotated[
    Path | None, typer.Option("--json", help="Also write the figures here.", callback=in_a_folder)
]
DocPath = Annotated[
    Path | None,
    typer.Option("--doc", help="Also write the tables here, as Markdown.", callback=in_a_folder),
]
T = TypeVar("T")


def known(text: str, names: Collection[str], option: str) -> list[str]:
    """The comma-separated names, all if there are none.

    Raises `typer.BadParameter` where one is not of `names`.
    """
    chosen = text.split(",") if text else list(names)
    unknown = [name for name in chosen if name not in names]
    if unknown:
        raise typer.BadParameter(
            f"{', '.join(unknown)} not known; choose of {', '.join(names)}", param_hint=option
        )
    return chosen


def bar(console: Console, more: str = "", **options: Any) -> Progress:
    """A progress bar with the name, the count and the time of what is measured, and what is to be
    told of it beside.
    """
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    told = [TextColumn(more)] if more else []
    return Progress(*columns, TimeElapsedColumn(), *told, console=console, **options)


def tracked(items: Sequence[T], describe: Callable[[T], str], console: Console) -> Iterator[T]:
    """The items one by one, under a progress bar."""
    with bar(console) as progress:
        task = progress.add_task("", total=len(items))
        for item in items:
            progress.update(task, description=describe(item))
            yield item
            progress.advance(task)


def rich_table(rows: Sequence[Sequence[str]], left: int = 1, **options: Any) -> Table:
    """Rows, of which the first names the columns, with so many columns of words at the left."""
    table = Table(box=box.SIMPLE_HEAD, **options)
    for k, name in enumerate(rows[0]):
        table.add_column(name, justify="left" if k < left else "right")
    for row in rows[1:]:
        table.add_row(*row)
    return table


def markdown(rows: Sequence[Sequence[str]], left: int | None = None) -> str:
    """The same rows as a table of Markdown, without the markup of colours.

    Columns behind the first `left` are aligned to the right, if there is such a number.
    """
    plain = [[Text.from_markup(t).plain.replace("|", "·") for t in row] for row in rows]
    words = len(plain[0]) if left is None else left
    lines = [plain[0], ["---"] * words + ["---:"] * (len(plain[0]) - words), *plain[1:]]
    return "\n".join("| " + " | ".join(line).replace("\n", " ") + " |" for line in lines)


def in_child(module: str, *options: str, timeout_s: float) -> dict[str, Any]:
    """What a benchmark's module, run in a process of its own on one thread, prints last, as JSON.

    Raises `RuntimeError` with the end of what it said where it fails.
    """
    found = subprocess.run(
        [sys.executable, "-m", module, *options], capture_output=True, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=timeout_s, check=False,
    )  # fmt: skip
    if found.returncode:
        raise RuntimeError(f"{module} {' '.join(options)}: {found.stderr[-2000:]}")
    figures: dict[str, Any] = json.loads(found.stdout.splitlines()[-1])
    return figures


def on_one_core(run: Callable[[], T]) -> T:
    """What a run gives on one core, with as little collecting of garbage as commands have."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    leave_garbage()
    with few_collections():
        return run()


def write_json(path: Path | None, figures: Any) -> None:
    """Writes figures, which may be dataclasses, where a file is asked for."""
    if path is not None:
        path.write_text(json.dumps(figures, indent=1, default=dataclasses.asdict) + "\n")


def finish(
    console: Console,
    passed: bool,
    text: str,
    *,
    json_path: Path | None = None,
    figures: Any = None,
    doc: Path | None = None,
    page: Callable[[], str] = str,
) -> NoReturn:
    """Says whether everything passed, writes what is asked for, and exits with 1 if it did not."""
    said = f"{'passed' if passed else 'FAILED'}{': ' * bool(text)}{text}"
    console.print(said, markup=False, highlight=False, soft_wrap=True)
    if doc is not None:
        doc.write_text(page())
    write_json(json_path, figures)
    raise typer.Exit(0 if passed else 1)
