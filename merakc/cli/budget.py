"""`merakc budget`: what a training takes and costs, on which machines, before they are rented."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Annotated

import typer
from rich.console import Group
from rich.text import Text

from merakc.cli.console import (
    NO,
    PRICED,
    AsJson,
    DataParallel,
    Drawing,
    Figures,
    Limit,
    Offload,
    PipelineRanks,
    SharingExperts,
    SharingSequences,
    StateShards,
    TensorParallel,
    Tokens,
    TrustCode,
    answer,
    check_outputs,
    check_picture,
    check_used,
    ending_after,
    progress_console,
    told,
    working,
)
from merakc.cli.scale import offers_for, planned, request_of, short_shards, tell_of_others
from merakc.errors import ConfigError
from merakc.files.printable import count_of
from merakc.planner.offers import DEGREES, Case, Offer, distinctions, keeps, neighbours, write_csv
from merakc.report.charts.offers_plot import plot_offers
from merakc.report.tables import Fitted
from merakc.report.units import format_seconds
from merakc.report.yields import Goal, parse_count, shown_yields, yields

FEWEST = "fewest"
GIB = 1024**3
# Columns that are left out where all rows have the same, and those that are words.
VARIED = ("machines", "batch", "texts of", "shards", "recompute")
WORDS = ("machines", "dp,tp,pp", "shards", "recompute")
Lengths = Annotated[str | None, typer.Option("--seq", help="Tokens a text: 4096, or 4096,8192.")]
Counts = Annotated[
    str, typer.Option(help="Devices: 64, or 8,16, or 8:64 (doubled), or fewest (that fit).")
]
Prices = Annotated[
    str | None,
    typer.Option(help="Price of a device for an hour; one for all machines, or for each."),
]
Utilization = Annotated[
    float | None, typer.Option(help="Look for the smallest batch that keeps this MFU: 0.4.")
]
Near = Annotated[
    bool, typer.Option("--near", help="Also try each degree that is given halved and doubled.")
]


def budget(
    source: Annotated[str, typer.Argument(help="A model, as in `merakc plan`.")],
    batch: Annotated[str, typer.Option(help="Samples a step over all devices: 512, or 256,512.")],
    sequence: Lengths = None,
    ranks: Counts = FEWEST,
    cluster: Annotated[str, typer.Option(help="Presets or cluster files: h100,a100-80.")] = "h100",
    tokens: Tokens = None,
    price: Prices = None,
    mfu: Utilization = None,
    dp: DataParallel = None,
    tp: TensorParallel = None,
    pp: PipelineRanks = None,
    near: Near = False,
    cp: SharingSequences = None,
    ep: SharingExperts = None,
    state_shards: StateShards = None,
    recompute: Annotated[str, typer.Option(help="none, full, selective, stage or auto.")] = "auto",
    offload: Offload = "none",
    precision: Annotated[str, typer.Option(help="bf16-, fp8-, fp16-mixed or none.")] = "bf16-mixed",
    table: Figures = None,
    picture: Drawing = None,
    limit: Limit = None,
    trust: TrustCode = False,
    as_json: AsJson = False,
) -> None:
    """Say what a training takes and costs: tokens a day, days, energy and price.

    Options that are lists are tried in all combinations, each with its best plan, `merakc plan`'s.
    Ctrl-C, and the end of --limit, show what was found so far. Exits with 1 where nothing fits.
    """
    progress = progress_console()
    with told(progress), working(progress, f"reading {source}") as tell:
        check_outputs(csv=table, plot=picture)
        check_picture("plot", picture)
        goals = _goals(tokens, price, names := cluster.split(","))
        request = request_of(precision, state_shards, recompute=recompute, offload=offload)
        offers = offers_for(source, request.with_parts(cp, ep), tell, trust=trust)
        degrees = {name: n for name, n in (("dp", dp), ("tp", tp), ("pp", pp)) if n is not None}
        cases = [*_cases(names, ranks, batch, sequence)]
        cases = _with_degrees(cases, degrees, near=near)
        with ending_after(limit):
            found = offers.each(cases, _checked(mfu))
        made = planned(found)
        rows = [offer.row(goals[offer.case.machines]) for offer in found]
        if table is not None:
            write_csv(rows, table)
        if picture is not None:
            plot_offers(picture, *_bars(made, goals), title=source)
    answer(rows, offers_table(made, goals, mfu), as_json=as_json)
    tell_of_others(progress, found, len(cases) if offers.stopped else None)
    if not any(offer.made[1].fits for offer in made):
        raise typer.Exit(NO)


def _checked(mfu: float | None) -> float | None:
    if mfu is not None and not 0 < mfu < 1:
        raise ConfigError(f"--mfu {mfu}: give a share between 0 and 1, such as 0.4")
    return mfu


def _with_degrees(cases: Sequence[Case], degrees: dict[str, int], *, near: bool) -> list[Case]:
    """The cases with degrees fixed, each followed by those `near` it. Raises `ConfigError`."""
    if near and not degrees:
        raise ConfigError("--near: give the degrees that it is about, such as --tp 4 --pp 2")
    fixed = [replace(case, fixed=degrees) for case in cases]
    return [one for case in fixed for one in (case, *(neighbours(case) if near else ()))]


def _goals(tokens: str | None, price: str | None, names: Sequence[str]) -> dict[str, Goal]:
    """What a training is to see, with the price of each of the machines. Raises `ConfigError`."""
    items = parse_count(tokens) if tokens is not None else 0.0
    try:
        prices = [float(text) for text in price.split(",")] if price else [0.0]
    except ValueError as error:
        raise ConfigError(
            f"--price {price}: give a number, or one for each of --cluster"
        ) from error
    if len(prices) == 1:
        prices *= len(names)
    if len(prices) != len(names):
        raise ConfigError(
            f"--price {price}: {count_of(len(prices), 'price')} for {count_of(len(names), 'kind')} "
            "of machines; give one, or one for each of --cluster"
        )
    check_used(tokens is not None, PRICED, price=price)
    return {name: Goal(items, own) for name, own in zip(names, prices, strict=True)}


def _cases(names: Sequence[str], ranks: str, batch: str, sequence: str | None) -> Iterator[Case]:
    """All combinations; 0 devices are the fewest. Raises `ConfigError`."""
    lengths = _numbers("--seq", sequence) if sequence else [None]
    counts = [0] if ranks == FEWEST else _numbers("--ranks", ranks)
    for name, count, length, size in product(names, counts, lengths, _numbers("--batch", batch)):
        yield Case(name, count, size, length)


def _numbers(option: str, text: str) -> list[int]:
    """`8,16`, or `8:64` for 8, 16, 32 and 64. Raises `ConfigError`."""
    found: list[int] = []
    for part in text.split(","):
        matched = re.fullmatch(r"\s*(\d{1,9})(?::(\d{1,9}))?\s*", part)
        first, last = (int(n or 0) for n in matched.groups()) if matched else (0, 0)
        if first and last and last < first:
            raise ConfigError(f"{option} {text}: {first} is more than {last}; give {last}:{first}")
        if not first or (last == 0 and ":" in part):
            raise ConfigError(
                f"{option} {text}: give numbers above 0, such as 8,16, or 8:64 for 8, 16, 32 and 64"
            )
        found += [first << k for k in range(64) if first << k <= max(first, last)]
    return found


def offers_table(
    offers: Sequence[Offer], goals: dict[str, Goal], mfu: float | None = None
) -> Group:
    """A row for each offer, then what is the same in all, and which are best; CSV and JSON hold
    more. Rows that miss the `mfu` that was asked for say so.
    """
    rows = [_cells(offer, goals[offer.case.machines]) for offer in offers]
    for row, offer in zip(rows, offers, strict=True):
        if mfu is not None and not keeps(offer, mfu):
            row["MFU"] += ": MISSED"
    same = {
        name: rows[0][name]
        for name in VARIED
        if len(rows) > 1 and len({row[name] for row in rows}) == 1
    }
    columns = {name: name not in WORDS for name in rows[0] if name not in same}
    table = Fitted(columns, [[row[name] for name in columns] for row in rows])
    lines = [", ".join(f"{name} {text}" for name, text in same.items() if text)]
    prices = [goals[offer.case.machines].price_per_hour for offer in offers]
    for place, names in distinctions(offers, prices).items():
        lines.append(f"{', '.join(names)}: {offers[place].case}")
    return Group(table, *(Text(line) for line in lines if line))


def _cells(offer: Offer, goal: Goal) -> dict[str, str]:
    """What is shown of an offer, by the heads of the columns."""
    strategy, found = offer.made
    peak = f"{found.peak_bytes / GIB:.1f} of {found.memory_bytes / GIB:.1f} GiB"
    cells = {
        "machines": offer.case.machines,
        "devices": f"{found.ranks:,}",
        "batch": f"{found.samples:,}",
        "texts of": f"{offer.case.sequence:,}" if offer.case.sequence else "",
        "dp,tp,pp": ",".join(str(getattr(strategy, axis)) for axis in DEGREES),
        "shards": short_shards(offer).replace(" ", ""),
        "recompute": strategy.recompute,
        "step": format_seconds(found.step_s),
        "MFU": f"{found.mfu:.0%}",
        "peak": peak if found.fits else f"{peak}: DOES NOT FIT",
    }
    return cells | shown_yields(yields(found, goal))


def _bars(
    offers: Sequence[Offer], goals: dict[str, Goal]
) -> tuple[list[str], dict[str, list[float]]]:
    """The labels of offers, and their figures to be drawn."""
    rows = [offer.row(goals[offer.case.machines]) for offer in offers]
    names = [name for name in yields(offers[0].made[1], goals[offers[0].case.machines])
             if all(name in row for row in rows)]  # fmt: skip
    panels = {name.replace("_", " "): [row[name] for row in rows] for name in names}
    panels["MFU, %"] = [100 * row["mfu"] for row in rows]
    return [f"{o.case}\n{o.strategy}" for o in offers], panels
