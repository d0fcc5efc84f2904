"""Loops of one's own, Trainer, peft, accelerate, Lightning and TRL on layouts, beside one process.

    python -m benchmarks.loops

Each program trains a small model with accumulated batches, clipping, warm-up, an evaluation with
metrics and a save in its middle, from which it goes on on the next layout. Losses, norms, metrics
and weights are compared with the same program, without the lines that are marked, in one process.
It exits with 1 where anything differs or is refused.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks.harness import JsonPath, finish, known
from benchmarks.loops.cells import LAYOUTS, LOOPS, changed_lines, compared, references

console = Console(highlight=False, markup=False, soft_wrap=True)
app = typer.Typer(add_completion=False)


@app.command()
def main(
    steps: Annotated[int, typer.Option(help="Of the optimizer, an even number.")] = 20,
    loops: Annotated[str, typer.Option(help="Names of loops, with commas between.")] = "",
    layouts: Annotated[str, typer.Option(help="Layouts, with commas between.")] = "",
    json_path: JsonPath = None,
) -> None:
    """Training programs of others on all layouts, and in one process."""
    if steps < 2 or steps % 2:
        raise typer.BadParameter(f"{steps}: an even number has a middle", param_hint="--steps")
    names = known(layouts, [*LAYOUTS], "--layouts")
    cells = []
    for loop in known(loops, [*LOOPS], "--loops"):
        lines = changed_lines(loop)
        console.print(f"{loop}: {len(lines)} lines changed")
        console.print("".join(f"    {line}\n" for line in lines), end="")
        with tempfile.TemporaryDirectory() as folder:
            plain = references(loop, steps, Path(folder))
        for layout in names:
            cells.append(cell := compared(loop, layout, steps, plain))
            console.print(f"  {cell.layout:<11}then {cell.then:<11}{cell.said}")
    good = sum(c.passed for c in cells)
    text = f"{good} of {len(cells)} cells equal one process"
    finish(console, good == len(cells), text, json_path=json_path, figures=cells)


if __name__ == "__main__":
    app()
