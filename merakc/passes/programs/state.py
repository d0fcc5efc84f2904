"""Chooses how a stage's parameters, gradients and optimizer state are sharded over dp."""

from __future__ import annotations

from collections.abc import Sequence

from merakc.costs.state import MIXED, DpGroup, Layer, Precision, StateCost, state_cost
from merakc.errors import PlanError
from merakc.ir.state import StateShards, lattice


def choose_state(
    layers: Sequence[Layer],
    micro_batches: int,
    group: DpGroup,
    budget_bytes: int,
    precision: Precision = MIXED,
    *,
    optimizer_bytes_per_s: float = float("inf"),
) -> tuple[StateShards, StateCost]:
    """The fastest point of the lattice whose state fits `budget_bytes`, by exhaustion.

    AMSP (arXiv 2311.00257, section IV) minimises the seconds of communication; here it is the step,
    in which only exposed communication counts, and among equals the least communication.

    Raises `PlanError` where no point fits.
    """
    costs = {
        shards: state_cost(
            layers, micro_batches, shards, group, precision,
            optimizer_bytes_per_s=optimizer_bytes_per_s,
        )
        for shards in lattice(group.dp)
    }  # fmt: skip
    fitting = {s: c for s, c in costs.items() if c.state_bytes <= budget_bytes}
    if not fitting:
        least = min(c.state_bytes for c in costs.values())
        raise PlanError(
            f"parameters, gradients and optimizer state take {least} bytes of each rank in as many "
            f"shards as dp={group.dp} allows, and {budget_bytes} are left for them; use more ranks"
        )
    best = min(fitting, key=lambda s: (round(fitting[s].step_s, 9), fitting[s].communication_s, s))
    return best, fitting[best]
