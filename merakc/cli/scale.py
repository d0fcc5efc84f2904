"""`merakc scale`: the best plan at each number of devices."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from merakc.cli.clusters import machines
from merakc.cli.console import AsJson, TrustCode, check_outputs, progress_console, told, working
from merakc.errors import ConfigError
from merakc.ir.precision import parse_precision
from merakc.planner.offline import Recordings
from merakc.planner.request import Request
from merakc.planner.scaling import SizedPlan, sweep, write_csv
from merakc.planner.sources import load_source
from merakc.report.charts.scaling_plot import plot_scaling
from merakc.report.tables import Fitted
from merakc.report.terminal import Terminal
from merakc.report.units import format_seconds

PICTURES = (".png", ".svg", ".pdf")


def scale(
    source: Annotated[str, typer.Argument(help="A model, as in `merakc plan`.")],
    cluster: Annotated[str, typer.Option(help="A preset, or a cluster file.")] = "h100",
    least: Annotated[int, typer.Option("--from", help="Devices to begin with.", min=1)] = 8,
    most: Annotated[int, typer.Option("--to", help="Devices to end with.", min=1)] = 4096,
    batch: Annotated[
        int | None, typer.Option(help="Samples a step, the same everywhere.", min=1)
    ] = None,
    per_rank: Annotated[
        float | None, typer.Option(help="Samples a step for each device.", min=0)
    ] = None,
    sequence: Annotated[int | None, typer.Option("--seq", help="Tokens a text.", min=1)] = None,
    tp: Annotated[int | None, typer.Option(help="Tensor-parallel degree.", min=1)] = None,
    pp: Annotated[int | None, typer.Option(help="Pipeline ranks.", min=1)] = None,
    state_shards: Annotated[str | None, typer.Option(help="zero-0 to zero-3.")] = None,
    recompute: Annotated[str, typer.Option(help="none, full, selective, stage or auto.")] = "auto",
    precision: Annotated[str, typer.Option(help="bf16-mixed, fp16-mixed or none.")] = "bf16-mixed",
    table: Annotated[Path | None, typer.Option("--csv", help="Write the figures to it.")] = None,
    picture: Annotated[Path | None, typer.Option("--plot", help="A .png, .svg or .pdf.")] = None,
    trust: TrustCode = False,
    as_json: AsJson = False,
) -> None:
    """Sweep the number of devices, doubling it: the best plan at each."""
    progress = progress_console()
    with told(progress), working(progress, f"reading {source}") as tell:
        check_outputs(csv=table, plot=picture)
        if picture is not None and picture.suffix not in PICTURES:
            raise ConfigError(f"--plot {picture}: its name must end with {', '.join(PICTURES)}")
        counts = [least << k for k in range(64) if least << k <= most]
        if not counts:
            raise ConfigError(f"--from {least} is more than --to {most}; swap them")
        request = Request(
            0, 0, tp=tp, pp=pp, state_shards=state_shards, recompute=recompute,
            precision=None if precision == "none" else parse_precision(precision),
        )  # fmt: skip
        record = Recordings(load_source(source, sequence, trust_remote_code=trust), request, tell)
        dtype = request.precision.compute if request.precision else "float32"
        at = partial(machines, cluster, dtype)
        points = sweep(record, request, at, counts, per_rank, batch)
        if table is not None:
            write_csv(points, table)
        if picture is not None:
            _draw(picture, points, f"{source} on {cluster}")
    if as_json:
        Terminal().print_json(json.dumps([point.row for point in points]))
    else:
        Terminal().print(points_table(points))


def points_table(points: Sequence[SizedPlan]) -> Fitted:
    """A row for each number of devices; CSV and JSON hold more."""
    heads = (
        "devices", "dp", "tp", "pp", "shards", "step", "tok/s each", "to first", "MFU",
        "W each", "tok/J",
    )  # fmt: skip
    rows = [
        (
            f"{p.ranks:,}", *(str(getattr(p.strategy, axis)) for axis in ("dp", "tp", "pp")),
            _shards(p), format_seconds(p.step_s),
            f"{p.tokens_per_s_per_rank:,.0f}",
            f"{p.tokens_per_s_per_rank / points[0].tokens_per_s_per_rank:.2f}", f"{p.mfu:.0%}",
            f"{p.power_w:.0f}", f"{p.tokens_per_joule:.2f}",
        )
        for p in points
    ]  # fmt: skip
    return Fitted(dict.fromkeys(heads, True), rows)


def _shards(point: SizedPlan) -> str:
    """The shards of parameters, gradients and optimizer state; `dp` for one on every dp rank."""
    dp, parts = point.strategy.dp, point.shards.split(", ")
    counts = ("dp" if n == str(dp) and dp > 1 else n for n in parts if "bucket" not in n)
    return ", ".join(counts)


def _draw(path: Path, points: Sequence[SizedPlan], title: str) -> None:
    panels = {
        "tokens a second and device": [p.tokens_per_s_per_rank for p in points],
        "MFU, %": [100 * p.mfu for p in points],
        "tokens a joule": [p.tokens_per_joule for p in points],
    }
    labels = [f"dp {s.dp} tp {s.tp} pp {s.pp}" for s in (p.strategy for p in points)]
    plot_scaling(path, [p.ranks for p in points], panels, labels, title=title)
