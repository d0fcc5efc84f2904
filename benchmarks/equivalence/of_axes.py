"""Ranks that share experts or sequences train exactly as one process does.

Mixtures of experts over ep, and models of all kinds over cp, in float64 with their float32 casts
lifted: losses, gradients and weights of each step, against one process; each training twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.console import Console

from benchmarks.equivalence.cells import conclude
from benchmarks.equivalence.of_layouts import LayoutCell, cells_rows, measure_cell
from benchmarks.harness import JsonPath, rich_table, tracked

MODELS_OF: Mapping[str, tuple[str, ...]] = {
    "ep": ("mixtral", "mixtral_balanced", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v3",
           "gpt_oss", "granite_moe", "jamba", "loop_index_add", "loop_uneven",
           "loop_masked_writes", "loop_capacity", "loop_hit", "loop_normed",
           "switch_transformers"),
    "cp": ("llama", "gpt2", "qwen2", "gemma3", "t5", "bart", "whisper", "vit", "mamba",
           "llama_packed"),
}  # fmt: skip
# (dp, ranks of the axis, pp), and tp beside them
LAYOUTS: Mapping[str, tuple[tuple[int, ...], ...]] = {
    "ep": ((1, 2, 1), (1, 4, 1), (1, 2, 2), (2, 2, 1), (1, 2, 1, 2)),
    "cp": ((1, 2, 1), (1, 4, 1), (1, 2, 2), (2, 2, 1), (1, 2, 1, 2)),
}


def main(
    axes: Annotated[str, typer.Option(help="ep, cp, or both, separated by a comma.")] = "ep,cp",
    models: Annotated[str, typer.Option(help="Only these, separated by commas.")] = "",
    json_path: JsonPath = None,
    timeout_s: Annotated[float, typer.Option("--timeout", help="Seconds per training.")] = 120.0,
) -> None:
    """Compares models whose experts or sequences are shared; exits with 1 where one differs."""
    console = Console()
    wanted = [m for m in models.split(",") if m]
    every: list[LayoutCell] = []
    for axis in axes.split(","):
        if axis not in MODELS_OF:
            raise typer.BadParameter(f"axes is '{axes}'; it names ep, cp or both")
        planned = [
            LayoutCell(model, layout, axis=axis)
            for model in MODELS_OF[axis]
            for layout in LAYOUTS[axis]
            if not wanted or model in wanted
        ]
        described = tracked(planned, lambda c: f"{c.model} {c.layout}", console)
        cells = [measure_cell(cell, True, timeout_s) for cell in described]
        title = f"Largest relative error in float64, dp·{axis}·pp, and tp beside it"
        console.print(rich_table(cells_rows(cells), title=title))
        every += cells
    conclude(console, every, json_path, most_refused=1.0)


def of_axes(context: typer.Context, axes: Annotated[str, typer.Option(help="ep,cp")] = "") -> None:
    """The tables as commands; each exits with 1 where a bound is exceeded."""
    if axes:
        arguments: dict[str, Any] = {"models": "", "json_path": None, "timeout_s": 120.0}
        main(axes, **arguments)
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)
