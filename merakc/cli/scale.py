"""`merakc scale`: the best plan at each number of devices."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from merakc.cli.clusters import machines
from merakc.cli.console import (
    STOPPED,
    AsJson,
    DataParallel,
    Drawing,
    Figures,
    Limit,
    Offload,
    PipelineRanks,
    Price,
    SampleTokens,
    SharingExperts,
    SharingSequences,
    StateShards,
    TensorParallel,
    Tokens,
    TrustCode,
    answer,
    check_outputs,
    check_picture,
    ending_after,
    goal_of,
    progress_console,
    shards_of,
    told,
    working,
)
from merakc.errors import ConfigError
from merakc.ir.precision import parse_precision
from merakc.planner.offers import DEGREES, Case, Offer, Offers, write_csv
from merakc.planner.request import Request
from merakc.planner.sources.source import load_source
from merakc.report.charts.scaling_plot import plot_scaling
from merakc.report.tables import Fitted
from merakc.report.units import format_seconds
from merakc.report.yields import Goal, shown_yields, yields

Batch = Annotated[
    int | None, typer.Option(help="Samples a step, over all devices, the same everywhere.", min=1)
]
PerRank = Annotated[
    float | None,
    typer.Option(help="Samples for each device, in place of --batch (0.5: one for two devices)."),
]


def scale(
    source: Annotated[str, typer.Argument(help="A model, as in `merakc plan`.")],
    cluster: Annotated[str, typer.Option(help="A preset, or a cluster file.")] = "h100",
    least: Annotated[int, typer.Option("--from", help="The fewest devices.", min=1)] = 8,
    most: Annotated[int, typer.Option("--to", help="The most devices.", min=1)] = 4096,
    batch: Batch = None,
    per_rank: PerRank = None,
    sequence: SampleTokens = None,
    dp: DataParallel = None,
    tp: TensorParallel = None,
    cp: SharingSequences = None,
    ep: SharingExperts = None,
    pp: PipelineRanks = None,
    state_shards: StateShards = None,
    recompute: Annotated[str, typer.Option(help="none, full, selective, stage or auto.")] = "auto",
    precision: Annotated[str, typer.Option(help="bf16-, fp8-, fp16-mixed or none.")] = "bf16-mixed",
    offload: Offload = "none",
    tokens: Tokens = None,
    price: Price = None,
    limit: Limit = None,
    table: Figures = None,
    picture: Drawing = None,
    trust: TrustCode = False,
    as_json: AsJson = False,
) -> None:
    """Sweep the number of devices, doubling it: the best plan at each.

    The batch is the same everywhere (strong scaling), or grows with them (weak scaling). Numbers on
    which nothing fits are passed over. Ctrl-C, and the end of --limit, show what was found so far.
    """
    progress = progress_console()
    with told(progress), working(progress, f"reading {source}") as tell:
        check_outputs(csv=table, plot=picture)
        check_picture("plot", picture)
        goal = goal_of(tokens, price)
        cases = _cases(cluster, (least, most), (batch, per_rank), sequence)
        asked = request_of(precision, state_shards, recompute=recompute, offload=offload)
        request = replace(asked, dp=dp, tp=tp, pp=pp).with_parts(cp, ep)
        offers = offers_for(source, request, tell, trust=trust)
        with ending_after(limit):
            points = offers.each(cases)
        made = planned(points)
        if table is not None:
            write_csv([point.row(goal) for point in points], table)
        if picture is not None:
            _draw(picture, made, f"{source} on {cluster}")
    answer([point.row(goal) for point in points], points_table(made, goal), as_json=as_json)
    tell_of_others(progress, points, len(cases) if offers.stopped else None)


def _cases(
    cluster: str, ranks: tuple[int, int], size: tuple[int | None, float | None],
    sequence: int | None,
) -> list[Case]:  # fmt: skip
    """A case for each number of devices, from the first to the last. Raises `ConfigError`."""
    least, most = ranks
    counts = [least << k for k in range(64) if least << k <= most]
    if not counts:
        raise ConfigError(f"--from {least} is more than --to {most}; swap them")
    batch, per_rank = size
    if (per_rank is None) == (batch is None):
        raise ConfigError(
            "give one of --batch, samples a step over all devices (strong scaling), and "
            "--per-rank, samples for each device (weak scaling)"
        )
    if per_rank is not None and not 0 < per_rank < math.inf:
        raise ConfigError(f"--per-rank {per_rank:g}: give a number above 0, such as 2 or 0.5")
    return [
        Case(cluster, count, batch or max(1, round(count * (per_rank or 0))), sequence)
        for count in counts
    ]


def request_of(precision: str, state_shards: str | None, **given: Any) -> Request:
    """What is asked in all cases, of options as text. Raises `ConfigError`."""
    mixed = None if precision == "none" else parse_precision(precision)
    return Request(0, 0, precision=mixed, state_shards=shards_of(state_shards), **given)


def offers_for(
    source: str, request: Request, tell: Callable[[str], None], *, trust: bool
) -> Offers:
    """Those for a model that the user names, in the precision of a request."""
    mixed = request.precision
    dtype = mixed.compute if mixed else "float32"
    return Offers(
        lambda length: load_source(source, length, trust_remote_code=trust), request,
        lambda name, ranks: machines(name, dtype, ranks), tell,
    )  # fmt: skip


def planned(offers: Sequence[Offer]) -> list[Offer]:
    """Those that have a plan. Raises the first error where none has."""
    made = [offer for offer in offers if offer.error is None]
    if not made:
        assert offers[0].error is not None
        raise offers[0].error
    return made


def tell_of_others(problem: Console, offers: Sequence[Offer], stopped: int | None) -> None:
    """A line for each case without a plan; and that Ctrl-C has ended the search of so many cases,
    which exits.
    """
    for offer in offers:
        if offer.error is not None:
            problem.print(f"no plan for {offer.case}: {offer.error}")
    if stopped is not None:
        problem.print(f"stopped after {len(offers)} of {stopped}")
        raise typer.Exit(STOPPED)


def points_table(points: Sequence[Offer], goal: Goal) -> Fitted:
    """A row for each number of devices; CSV and JSON hold more."""
    first = points[0].made[1]
    rows, more = [], dict[str, str]()
    for point in points:
        strategy, verdict = point.made
        rate = verdict.items_per_s / verdict.ranks
        per_joule = rate / verdict.power_w if verdict.power_w else 0.0
        more = shown_yields(yields(verdict, goal)) if goal.items else {}
        rows.append((
            f"{verdict.ranks:,}", *(str(getattr(strategy, axis)) for axis in DEGREES),
            short_shards(point), format_seconds(verdict.step_s), f"{rate:,.0f}",
            f"{rate * first.ranks / first.items_per_s:.2f}", f"{verdict.mfu:.0%}",
            f"{verdict.power_w:.0f}", f"{per_joule:.2f}", *more.values(),
        ))  # fmt: skip
    heads = ["devices", *DEGREES, "shards", "step", "tok/s each", "to first", "MFU", "W each",
             "tok/J", *more]  # fmt: skip
    return Fitted(dict.fromkeys(heads, True), rows)


def short_shards(offer: Offer) -> str:
    """The shards of parameters, gradients and optimizer state; `dp` for one on every dp rank."""
    dp, parts = offer.made[0].dp, offer.shards.split(", ")
    counts = ("dp" if n == str(dp) and dp > 1 else n for n in parts if "bucket" not in n)
    return ", ".join(counts)


def _draw(path: Path, points: Sequence[Offer], title: str) -> None:
    rows = [point.row(Goal()) for point in points]
    name = points[0].made[1].items[1]
    panels = {
        f"{name} a second and device": [row[f"{name}_per_s_per_rank"] for row in rows],
        "MFU, %": [100 * row["mfu"] for row in rows],
        f"{name} a joule": [row[f"{name}_per_joule"] for row in rows],
    }
    labels = [f"dp {row['dp']} tp {row['tp']} pp {row['pp']}" for row in rows]
    plot_scaling(path, [row["ranks"] for row in rows], panels, labels, title=title)
