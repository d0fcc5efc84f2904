"""How a job scales: the best plan at each number of devices, what it yields and what it draws."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from merakc.errors import ConfigError
from merakc.ir.state import UNSHARDED
from merakc.ir.strategy import Strategy
from merakc.lowering.lowered import Lowered
from merakc.machines.cluster import Cluster
from merakc.planner.offline import Recordings, plan_recorded
from merakc.planner.piece_table import PieceTable
from merakc.planner.request import Request
from merakc.report.analysis import make_report

# What a device draws while it waits for communication, of what it draws while it computes. From
# 128 to 2,048 H100 the throughput of each falls by 37 % and its power by 6 % (arXiv 2411.13055).
WAITING_POWER = 0.84
SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class SizedPlan:
    """The best plan on so many ranks; `tokens` are those of a step, or its samples without any.

    `full_power_w` is what a device draws on average while it computes, `waiting_share` the share of
    a step in which it waits, `mfu` the model's flops a second over the peak rate.
    """

    strategy: Strategy
    step_s: float
    tokens: int
    mfu: float
    full_power_w: float
    waiting_share: float

    @property
    def ranks(self) -> int:
        """Of the plan."""
        return self.strategy.world_size

    @property
    def shards(self) -> str:
        """Those of parameters, gradients and optimizer state, in words."""
        return "; ".join(dict.fromkeys(map(str, self.strategy.state_shards or (UNSHARDED,))))

    @property
    def tokens_per_s_per_rank(self) -> float:
        """Of each device."""
        return self.tokens / self.step_s / self.ranks

    @property
    def power_w(self) -> float:
        """A device's on average."""
        return self.full_power_w * (1.0 - self.waiting_share * (1.0 - WAITING_POWER))

    @property
    def tokens_per_joule(self) -> float:
        """0 where nothing is known of the power."""
        return self.tokens_per_s_per_rank / self.power_w if self.power_w else 0.0

    @property
    def row(self) -> dict[str, Any]:
        """All figures, by name."""
        names = "ranks", "shards", "step_s", "tokens_per_s_per_rank", "mfu", "power_w"
        degrees = {name: getattr(self.strategy, name) for name in ("dp", "tp", "pp")}
        return {
            "batch_size": self.strategy.total_batch_size, **degrees, "layout": str(self.strategy),
            **{name: getattr(self, name) for name in names},
            "tokens_per_s": self.tokens / self.step_s, "tokens_per_joule": self.tokens_per_joule,
            "tokens_per_rank_hour": self.tokens_per_s_per_rank * SECONDS_PER_HOUR,
            "waiting_share": self.waiting_share,
        }  # fmt: skip


def sweep(
    record: Recordings,
    request: Request,
    machines: Callable[[int], Cluster],
    ranks: Sequence[int],
    samples_per_rank: float | None,
    batch_size: int | None,
) -> list[SizedPlan]:
    """The best plan at each number of ranks: that of `merakc plan` there.

    The batch is `batch_size` everywhere (strong scaling), or grows by `samples_per_rank` (weak).
    Raises `ConfigError` where both or none are given, and as `plan_offline` does.
    """
    if (samples_per_rank is None) == (batch_size is None):
        raise ConfigError(
            "give the batch of all ranks for strong scaling, or samples a rank for weak scaling, "
            "and not both"
        )
    if samples_per_rank is not None and not 0 < samples_per_rank < math.inf:
        raise ConfigError(f"{samples_per_rank} samples a rank: give a number above 0, such as 0.5")
    plans: list[SizedPlan] = []
    table: PieceTable | None = None
    for count in ranks:
        record.progress(f"comparing layouts of {count} ranks")
        cluster = machines(count)
        table = PieceTable(record, cluster) if table is None else table.on(cluster)
        size = batch_size or max(1, round(count * (samples_per_rank or 0)))
        asked = replace(request, world_size=count)
        lowered, _ = plan_recorded(record, asked, size, cluster, table)
        plans.append(_sized(lowered, cluster))
    return plans


def _sized(lowered: Lowered, cluster: Cluster) -> SizedPlan:
    """What a plan yields and draws, by its report."""
    report, strategy = make_report(lowered, cluster), lowered.plan.strategy
    verdict = report.verdict
    tp_s = sum(axis.exposed_s for axis in report.traffic if axis.axis == "tp")
    busy_s = sum(rank.compute_s for rank in report.ranks) / len(report.ranks) - tp_s
    devices = cluster.described(verdict.ranks).devices[: verdict.ranks]
    full_power_w = sum(device.power_w for device in devices) / verdict.ranks
    waiting_share = 1.0 - busy_s / verdict.step_s
    return SizedPlan(
        strategy, verdict.step_s, verdict.tokens or verdict.samples, verdict.mfu, full_power_w,
        waiting_share=waiting_share,
    )  # fmt: skip


def write_csv(plans: Sequence[SizedPlan], path: Path) -> None:
    """A row for each number of ranks."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(plans[0].row))
        writer.writeheader()
        writer.writerows(plan.row for plan in plans)
