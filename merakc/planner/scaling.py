"""How a job scales: the best plan at each number of devices, what it yields and what it draws."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from merakc.errors import ConfigError
from merakc.machines.cluster import Hardware
from merakc.machines.cluster_files import hardware_for
from merakc.planner.candidates import Candidate, find_candidates
from merakc.planner.choose import describe, state_precision
from merakc.planner.fit import fit_error
from merakc.planner.offline import Recordings, check_request
from merakc.planner.piece_table import PieceTable
from merakc.planner.search import Request

# What a device draws while it waits for communication, of what it draws while it computes. From
# 128 to 2,048 H100 the throughput of each falls by 37 % and its power by 6 % (arXiv 2411.13055).
WAITING_POWER = 0.84
SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class Point:
    """The best plan on so many ranks; tokens are elements of the batch's first integer tensor.

    `power_w` is a device's on average, `mfu` the model's flops a second over the peak rate.
    """

    ranks: int
    batch_size: int
    dp: int
    tp: int
    pp: int
    layout: str
    shards: str
    step_s: float
    tokens_per_s: float
    tokens_per_s_per_rank: float
    mfu: float
    power_w: float
    tokens_per_joule: float
    tokens_per_rank_hour: float
    waiting_share: float


def sweep(
    record: Recordings,
    request: Request,
    cluster: str,
    ranks: Sequence[int],
    samples_per_rank: float | None,
    batch_size: int | None,
) -> list[Point]:
    """The best plan at each number of ranks, by the pieces of the model.

    The batch is `batch_size` everywhere (strong scaling), or grows by `samples_per_rank` (weak).
    Raises `ConfigError` where both or none are given, and as `find_candidates`
    does; `FitError` where nothing fits.
    """
    if (samples_per_rank is None) == (batch_size is None):
        raise ConfigError(
            "give the batch of all ranks for strong scaling, or samples a rank for weak scaling, "
            "and not both"
        )
    if samples_per_rank is not None and not 0 < samples_per_rank < math.inf:
        raise ConfigError(f"{samples_per_rank} samples a rank: give a number above 0, such as 0.5")
    found = []
    table: PieceTable | None = None
    for count in ranks:
        record.progress(f"comparing layouts of {count} ranks")
        hardware = hardware_for(cluster, count)
        machines = hardware.flat()
        table = PieceTable(record, machines) if table is None else table
        size = batch_size or max(1, round(count * (samples_per_rank or 0)))
        asked = replace(request, world_size=count)
        check_request(asked, size)
        asked = replace(asked, total_batch_size=size)
        precision = state_precision(record, request)
        candidates = find_candidates(table, asked, hardware, precision)
        if not candidates.found:
            raise fit_error(asked, record, machines, table)
        found.append(_point(record, candidates.found[0], hardware, size))
    return found


def _point(record: Recordings, best: Candidate, hardware: Hardware, batch_size: int) -> Point:
    degrees, step_s = best.layout.degrees, best.estimate.step_s
    ranks = degrees.ranks
    tokens = record.tokens_per_sample * batch_size
    devices = hardware.devices[:ranks]
    # The model's flops are those of one rank's forward and backward, times the tp ranks.
    flops = best.flops * degrees.tp * degrees.micro_batches * degrees.dp
    peak = sum(d.flops_per_s(record.dtype) / d.product_share for d in devices)
    waiting = 1.0 - (best.seconds["arithmetic"] + best.seconds["recomputation"]) / step_s
    power_w = sum(d.power_w for d in devices) / ranks * (1.0 - waiting * (1.0 - WAITING_POWER))
    per_rank = tokens / step_s / ranks
    shards = best.habits.shards
    return Point(
        ranks, batch_size, degrees.dp, degrees.tp, degrees.pp, describe(best.layout), str(shards),
        step_s, tokens / step_s, per_rank, flops / (step_s * peak), power_w,
        per_rank / power_w if power_w else 0.0, per_rank * SECONDS_PER_HOUR, waiting,
    )  # fmt: skip


def write_csv(points: Sequence[Point], path: Path) -> None:
    """A row for each number of ranks."""
    with path.open("w", newline="") as file:
        rows = [asdict(point) for point in points]
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
