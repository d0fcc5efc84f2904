"""What of the GPU path can be proven without a GPU: see docs/gpu.md.

    python -m benchmarks.gpu_path

Steps of every kind are run under NCCL's rules. It exits with 1 where one comes to no end, or where
something that is put in is not noticed.
"""

from __future__ import annotations

import time
from typing import Annotated

import typer
from rich.console import Console

from benchmarks.gpu_path.orders import Orders, cases, check, sabotage
from benchmarks.harness import JsonPath, finish, rich_table, tracked

console = Console(highlight=False, markup=False, soft_wrap=True)
app = typer.Typer(add_completion=False)


@app.command()
def main(
    every: Annotated[int, typer.Option(help="Only one of so many plans.", min=1)] = 1,
    seeds: Annotated[int, typer.Option(help="Sabotages of each kind of order.", min=1)] = 20,
    json_path: JsonPath = None,
) -> None:
    """Orders of calls on communicators."""
    start_s = time.perf_counter()
    found = Orders()
    for case in tracked([*cases()][::every], lambda c: f"{c.name}, pp={c.pp}", console):
        check(case, found)
    sabotage(found, seeds)
    console.print(f"{found.plans:,} plans, connected eagerly and lazily: ", end="")
    console.print(f"{len(found.complaints)} come to no end or have orders that differ")
    for text in found.complaints[:10]:
        console.print(f"  {text}")
    rows = [["put in", "noticed", "of"]]
    rows += [[kind, str(n), str(of)] for kind, (n, of) in found.caught.items()]
    console.print(rich_table(rows))
    text = f"{time.perf_counter() - start_s:.0f} s"
    finish(console, found.passed, text, json_path=json_path, figures=found)


if __name__ == "__main__":
    app()
