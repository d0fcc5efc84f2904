"""How a job scales: the best plan at each number of devices, what it yields and what it draws."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import cast

from merakc.errors import ConfigError
from merakc.ir.plan import Plan
from merakc.machines.cluster import DtypeName, Hardware
from merakc.machines.cluster_files import hardware_for
from merakc.planner.candidates import Candidate
from merakc.planner.choose import describe
from merakc.planner.offline import Recordings, nearest, plan_recorded
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
    """The plan of `merakc plan` at each number of ranks, in figures.

    The batch is `batch_size` everywhere (strong scaling), or grows by `samples_per_rank` (weak).
    Raises `ConfigError` where both or none are given, and as `plan_recorded` does.
    """
    if (samples_per_rank is None) == (batch_size is None):
        raise ConfigError(
            "give the batch of all ranks for strong scaling, or samples a rank for weak scaling, "
            "and not both"
        )
    if samples_per_rank is not None and not 0 < samples_per_rank < math.inf:
        raise ConfigError(f"{samples_per_rank} samples a rank: give a number above 0, such as 0.5")
    found = []
    dtype = request.precision.compute if request.precision else "float32"
    for count in ranks:
        record.progress(f"planning for {count} ranks")
        hardware = hardware_for(cluster, count)
        size = batch_size or max(1, round(count * (samples_per_rank or 0)))
        asked = replace(request, world_size=count)
        lowered, candidates = plan_recorded(
            record, asked, size, hardware.flat(cast(DtypeName, dtype))
        )
        own = nearest(candidates, lowered.plan)
        found.append(_point(record, lowered.plan, own, hardware, size))
    return found


def _point(
    record: Recordings, plan: Plan, of: Candidate, hardware: Hardware, batch_size: int
) -> Point:
    """What a plan yields; what its seconds go into is told by the candidate that it is of."""
    assert plan.prediction is not None
    step_s, ranks = plan.prediction.step_s, plan.mesh.world_size
    tokens = record.tokens_per_sample * batch_size
    devices = hardware.devices[:ranks]
    # The model's flops are those of one rank's forward and backward, times the tp ranks.
    flops = of.flops * plan.tp * plan.micro_batches * plan.dp
    peak = sum(d.flops_per_s(record.dtype) / d.product_share for d in devices)
    computing_s = of.seconds["arithmetic"] + of.seconds["recomputation"]
    waiting = max(0.0, 1.0 - computing_s / step_s)
    power_w = sum(d.power_w for d in devices) / ranks * (1.0 - waiting * (1.0 - WAITING_POWER))
    per_rank = tokens / step_s / ranks
    layout = replace(of.layout, degrees=replace(of.layout.degrees, schedule=plan.schedule))
    return Point(
        ranks, batch_size, plan.dp, plan.tp, plan.pp, describe(layout), str(plan.shards(0)),
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
