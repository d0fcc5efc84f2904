"""The tables as commands; each exits with 1 where a bound is exceeded."""

import torch
import typer

from benchmarks.equivalence import of_axes, of_layouts, of_overlap, of_schedules, of_state

app = typer.Typer(invoke_without_command=True, callback=of_axes.of_axes)
for module in (of_layouts, of_schedules, of_overlap, of_state, of_axes):
    app.command(module.__name__.partition("of_")[2])(module.main)

if __name__ == "__main__":
    torch.set_num_threads(1)
    app()
