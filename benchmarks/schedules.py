"""`python -m benchmarks.schedules`: how long every schedule takes, what it holds, and `auto`.

Stages take one unit of time for a forward, an input gradient, a weight gradient, a recomputation;
a rank's activations of one micro-batch are one unit of memory, and a checkpoint is 0.05 of it.
Everything here is arithmetic on such orders; no model runs. Exits with 1 where a figure known
from theory is not met exactly, or `auto` misses what is asked of it.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.harness import JsonPath, finish, rich_table
from merakc.ir.costs import StageCost
from merakc.schedules.bound import lower_bound_s
from merakc.schedules.generate import EFFORT, generate
from merakc.schedules.placement import place
from merakc.schedules.registry import make_schedule, stage_ranks
from merakc.schedules.timing import Pipeline, make_pipeline, time_schedule

KEPT = 40_000  # bytes of one unit of memory; many numbers divide it
UNIT = StageCost(
    forward_s=1.0,
    backward_s=2.0,
    input_grad_s=1.0,
    weight_grad_s=1.0,
    recompute_s=1.0,
    saved_bytes=KEPT,
    checkpoint_bytes=KEPT // 20,
    deferred_bytes=KEPT,
)
RANKS = (4, 8, 16)
ROUNDS = (2, 4, 8)  # micro-batches per rank

# Row, schedule, chunks, recomputed stages: all, all but the last, none.
LISTED = (
    ("GPipe", "gpipe", 1, "none"),
    ("1F1B, recomputing late", "1f1b", 1, "late"),
    ("1F1B, recomputing early", "1f1b", 1, "full"),
    ("the same, not on the last stage", "1f1b", 1, "not last"),
    ("Merak, shifted critical path", "merak", 1, "not last"),
    ("1F1B", "1f1b", 1, "none"),
    ("interleaved 1F1B, 2 chunks", "interleaved-1f1b", 2, "none"),
    ("interleaved 1F1B, 4 chunks", "interleaved-1f1b", 4, "none"),
    ("ZB-H1", "zb-h1", 1, "none"),
    ("ZB-H2", "zb-h2", 1, "none"),
    ("ZB-V", "zb-v", 2, "none"),
    ("V-Half", "v-half", 2, "none"),
    ("V-Min", "v-min", 2, "none"),
)
# Makespan and peak, by ranks and micro-batches, from the papers' formulas and our own trials.
EXPECTED = {
    "1F1B, recomputing late": {(4, 8): (44, 1.15), (8, 32): (156, 1.35), (16, 64): (316, 1.75)},
    "1F1B, recomputing early": {(4, 8): (41, 1.15)},
    "the same, not on the last stage": {(4, 8): (39, 1.15)},
    "Merak, shifted critical path": {
        (4, 8): (38, 1.15),
        (8, 32): (146, 1.35),
        (16, 64): (298, 1.75),
    },
    "1F1B": {(4, 8): (33, 4), (8, 32): (117, 8), (16, 64): (237, 16)},
    "interleaved 1F1B, 4 chunks": {
        (4, 8): (26.25, 4.75),
        (8, 32): (101.25, 9.75),
        (16, 64): (203.25, 19.75),
    },
    "ZB-H1": {(4, 8): (27, 4), (8, 32): (103, 8), (16, 64): (207, 16)},
    "ZB-V": {(4, 8): (25.5, 4), (8, 32): (99.5, 8), (16, 64): (199.5, 16)},
    "V-Min": {(4, 8): (29.5, 2), (8, 32): (109.5, 4), (16, 64): (221.5, 6)},
}
# What `auto` may take at most, by cap: at 4 ranks within 2 % of the figure, at 8 no more than it.
CAPPED = {
    (4, 8): {4.0: 25.5, 3.0: 26.5, 2.0: 29.0, 1.5: 32.0, 1.2: 32.5},
    (8, 32): {8.0: 99.5, 4.0: 109.5, 2.67: 125.0, 2.0: 133.5, 1.4: 137.0},
}
SLACK = {(4, 8): 1.02, (8, 32): 1.0}
# Ranks, micro-batches, and the seconds of one core that `auto` may take.
SPEED = ((16, 128, 10.0), (64, 256, 60.0))
# Ranks, micro-batches, and how much faster than plain 1F1B on equal layers.
UNEVEN = ((4, 16, 1.4), (8, 32, 1.5))
HEAD, EMBEDDING = 0.5, 0.05  # more work on the last and the first rank
PIECES = 32  # that a rank's layers can be cut into: 8 layers, at attention and at the MLP's halves


@dataclass(frozen=True, slots=True)
class Row:
    """A schedule in one cell; what it must not exceed, or must equal, where there is such."""

    name: str
    ranks: int
    micro_batches: int
    makespan: float
    bound: float
    peak: float
    limit: float | None = None
    exact: bool = False
    expected_peak: float | None = None

    @property
    def passed(self) -> bool:
        """Whether the limit is kept."""
        if self.limit is None:
            return True
        if self.exact:
            return (self.makespan, self.peak) == (self.limit, self.expected_peak)
        return self.makespan <= self.limit + 1e-9


def split_stages(costs: Sequence[StageCost], virtual_stages: int) -> tuple[StageCost, ...]:
    """The costs of the same model in so many times as many stages, each stage cut evenly."""
    assert virtual_stages >= 1, virtual_stages
    if virtual_stages == 1:
        return tuple(costs)
    return tuple(_part(cost, virtual_stages) for cost in costs for _ in range(virtual_stages))


def _part(cost: StageCost, virtual_stages: int) -> StageCost:
    """One of so many equal parts; bytes are rounded up."""
    return StageCost(
        **{
            name: -(-figure // virtual_stages)
            if name.endswith("_bytes")
            else figure / virtual_stages
            for name, figure in asdict(cost).items()
        }
    )


def unit_pipeline(rank_of: Sequence[int], ranks: int, micro_batches: int) -> Pipeline:
    """The pipeline of unit stages in this placement."""
    chunks = len(rank_of) // ranks
    return make_pipeline(rank_of, split_stages([UNIT] * ranks, chunks), micro_batches)


def late_recomputation(
    costs: Sequence[StageCost], stages: Collection[int]
) -> tuple[StageCost, ...]:
    """Costs where these stages recompute when the gradient has come, as stock checkpointing does.

    The recomputation is then a part of the backward, and nothing of it can run ahead.
    """
    return tuple(
        replace(
            c,
            backward_s=c.backward_s + c.recompute_s,
            input_grad_s=c.input_grad_s + c.recompute_s,
            recompute_s=0.0,
        )
        if s in stages
        else c
        for s, c in enumerate(costs)
    )


def listed_row(row: tuple[str, str, int, str], ranks: int, micro_batches: int) -> Row:
    """A known schedule in one cell. The bound is that of its own placement and memory."""
    label, name, chunks, recompute = row
    stages = range(ranks * chunks)
    recomputed = {"none": [], "late": stages, "full": stages, "not last": stages[:-1]}[recompute]
    schedule = make_schedule(
        name, ranks, micro_batches, virtual_stages=chunks, recompute=recomputed
    )
    pipeline = unit_pipeline(schedule.rank_of, ranks, micro_batches)
    costs = late_recomputation(pipeline.costs, stages) if recompute == "late" else pipeline.costs
    timing = time_schedule(schedule, costs)
    limit, peak = EXPECTED.get(label, {}).get((ranks, micro_batches), (None, None))
    return Row(
        label,
        ranks,
        micro_batches,
        makespan=timing.makespan_s,
        bound=lower_bound_s(pipeline, timing.peak_bytes),
        peak=max(timing.peak_bytes) / KEPT,
        limit=limit,
        exact=limit is not None,
        expected_peak=peak,
    )


def best_listed(rows: Sequence[Row]) -> Iterator[Row]:
    """The rows that no other row beats in time with as little memory, by memory."""
    shortest = float("inf")
    for row in sorted(rows, key=lambda r: (r.peak, r.makespan)):
        if row.makespan < shortest:
            shortest = row.makespan
            yield row


def auto_row(ranks: int, micro_batches: int, cap: float, limit: float, effort: int) -> Row:
    """`auto` under a cap, from the two placements with the fewest messages."""
    offered = [stage_ranks(name, ranks) for name in ("zb-v", "1f1b")]
    pipelines = [unit_pipeline(rank_of, ranks, micro_batches) for rank_of in offered]
    found = generate(pipelines, [round(cap * KEPT)] * ranks, effort=effort)
    timing = time_schedule(found.schedule, found.pipeline.costs)
    peak = max(timing.peak_bytes) / KEPT
    assert round(peak * KEPT) <= round(cap * KEPT), f"auto holds {peak} of {cap}"
    name = f"auto, cap {cap:g} ({found.method})"
    return Row(
        name,
        ranks,
        micro_batches,
        makespan=timing.makespan_s,
        bound=found.bound_s,
        peak=peak,
        limit=limit,
    )


def uneven_rows(ranks: int, micro_batches: int, factor: float, effort: int) -> list[Row]:
    """Plain 1F1B on equal layers, and `auto` on a balanced cut, its head spread over all stages.

    Both may hold what 1F1B holds. The messages of a vocabulary-parallel head are not counted.
    """
    m = micro_batches
    more = [0.0] * ranks
    more[0], more[-1] = EMBEDDING, HEAD
    equal = [_stage(1.0, extra) for extra in more]
    plain = make_schedule("1f1b", ranks, m)
    before = time_schedule(plain, equal)
    rank_of = place("v", ranks, 2)
    pieces = [0] * ranks
    for _ in range(PIECES * ranks):
        least = min(range(ranks), key=lambda r: pieces[r] / PIECES + (EMBEDDING if r == 0 else 0))
        pieces[least] += 1
    costs = []
    for stage, rank in enumerate(rank_of):
        mine = (pieces[rank] + (stage < ranks)) // 2
        extra = HEAD / len(rank_of) + (EMBEDDING if stage == 0 else 0.0)
        costs.append(_stage(mine / PIECES, extra))
    pipeline = make_pipeline(rank_of, costs, m)
    found = generate([pipeline], [ranks * KEPT] * ranks, effort=effort)
    timing = time_schedule(found.schedule, costs)
    equal_bound = lower_bound_s(make_pipeline(range(ranks), equal, m), before.peak_bytes)
    peaks = [max(t.peak_bytes) / KEPT for t in (before, timing)]
    limit = before.makespan_s / factor
    return [
        Row("1F1B, equal layers", ranks, m, before.makespan_s, equal_bound, peaks[0]),
        Row(
            "auto, balanced",
            ranks,
            m,
            makespan=timing.makespan_s,
            bound=found.bound_s,
            peak=peaks[1],
            limit=limit,
        ),
    ]


def _stage(layers: float, extra: float) -> StageCost:
    """A stage of so many ranks' layers, and as much work again as is extra."""
    work = layers + extra
    return replace(
        UNIT,
        forward_s=work,
        backward_s=2 * work,
        input_grad_s=work,
        weight_grad_s=work,
        recompute_s=layers,
        saved_bytes=round(layers * KEPT),
        checkpoint_bytes=round(layers * KEPT / 20),
        deferred_bytes=round(layers * KEPT),
    )


def table_of(title: str, rows: Sequence[Row]) -> Table:
    """One row a schedule."""
    texts = [["", "p", "m", "makespan", "T/3m", "bound", "peak", "asked", ""]]
    for row in rows:
        asked = "" if row.limit is None else ("= " if row.exact else "≤ ") + f"{row.limit:.6g}"
        texts.append([
            row.name, str(row.ranks), str(row.micro_batches), f"{row.makespan:.6g}",
            f"{row.makespan / 3 / row.micro_batches:.3f}", f"{row.bound:.4g}", f"{row.peak:.4g}",
            asked, "" if row.limit is None else ("ok" if row.passed else "MISSED"),
        ])  # fmt: skip
    return rich_table(texts, title=title)


def speed_rows(effort: int) -> list[dict[str, float]]:
    """Seconds of the processor for one `auto` at full size, under half of 1F1B's memory."""
    found = []
    for ranks, m, limit_s in SPEED:
        start_s = time.process_time()
        row = auto_row(ranks, m, ranks / 2, float("inf"), effort)
        taken_s = time.process_time() - start_s
        figures = {"ranks": ranks, "micro_batches": m, "seconds": taken_s, "limit_s": limit_s}
        found.append({**figures, "makespan": row.makespan, "bound": row.bound})
    return found


def main(
    json_path: JsonPath = None,
    ranks: Annotated[str, typer.Option(help="Comma-separated.")] = ",".join(map(str, RANKS)),
    effort: Annotated[int, typer.Option(help="Works that `auto` may schedule.")] = EFFORT,
    speed: Annotated[bool, typer.Option(help="Also time `auto` on large pipelines.")] = True,
) -> None:
    """Prints every table; exits with 1 where a row misses what is asked."""
    console = Console()
    every: dict[str, list[Row]] = {}
    sizes = [int(p) for p in ranks.split(",")]
    with Progress(console=console, transient=True) as progress:

        def watch(cells: Sequence[tuple[int, int]], what: str) -> Iterator[tuple[int, int]]:
            return iter(progress.track(cells, description=what))

        for p, m in watch([(p, k * p) for p in sizes for k in ROUNDS], "schedules and auto"):
            rows = [listed_row(row, p, m) for row in LISTED]
            best = [auto_row(p, m, r.peak, r.makespan, effort) for r in best_listed(rows)]
            every[f"p = {p}, m = {m}"] = rows + best
        for cell in watch([cell for cell in CAPPED if cell[0] in sizes], "auto under caps"):
            limits = {cap: limit * SLACK[cell] for cap, limit in CAPPED[cell].items()}
            capped = [auto_row(*cell, cap, limit, effort) for cap, limit in limits.items()]
            every[f"auto under caps, p = {cell[0]}, m = {cell[1]}"] = capped
        factors = {(p, m): factor for p, m, factor in UNEVEN if p in sizes}
        for cell in watch(list(factors), "uneven stages"):
            name = f"head +{HEAD:.0%}, embedding +{EMBEDDING:.0%}, p = {cell[0]}"
            every[name] = uneven_rows(*cell, factors[cell], effort)
        progress.add_task("auto at p = 16 and 64", total=None)
        timed = speed_rows(effort) if speed else []
    good, told = report(console, every, timed)
    figures = {"passed": good, "tables": every, "speed": timed}
    finish(console, good, told, json_path=json_path, figures=figures)


def report(
    console: Console, every: dict[str, list[Row]], timed: Sequence[dict[str, float]]
) -> tuple[bool, str]:
    """Prints the tables and what was missed; whether nothing was, and how much of it."""
    for name, rows in every.items():
        console.print(table_of(name, rows))
        if len(rows) == 2 and name.startswith("head"):
            console.print(f"{rows[0].makespan / rows[1].makespan:.3f} times as fast")
    missed = [row for rows in every.values() for row in rows if not row.passed]
    late = [figures for figures in timed if figures["seconds"] > figures["limit_s"]]
    for figures in timed:
        console.print(
            f"auto at p = {figures['ranks']}, m = {figures['micro_batches']}: "
            f"{figures['seconds']:.1f} s of one core, {figures['limit_s']:.0f} s allowed; "
            f"makespan {figures['makespan']:.6g}, bound {figures['bound']:.4g}"
        )
    for row in missed:
        console.print(f"MISSED: {row.name}, p = {row.ranks}, m = {row.micro_batches}")
    checked = sum(row.limit is not None for rows in every.values() for row in rows) + len(timed)
    good = not missed and not late
    return good, f"{checked - len(missed) - len(late)} of {checked} figures as asked"


if __name__ == "__main__":
    typer.run(main)
