"""A plan's decisions for other ranks, another batch, other machines or another model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from merakc.costs.ranks import rank_memory_bytes
from merakc.costs.work.keep import keep_bytes
from merakc.frontend.record import Recording
from merakc.ir.offload import OPTIMIZER, PARAMETERS, offload_text
from merakc.ir.plan import Plan
from merakc.ir.strategy import Strategy
from merakc.lowering.lowered import Lowered, make_plan
from merakc.lowering.overlap import overlap_gains, recorded_machines, with_parts
from merakc.lowering.predict import planned_costs
from merakc.machines.cluster import NOMINAL_GPU, Cluster


def _on_host_as(plan: Plan, made: Plan) -> Plan:
    """What of parameters lives on the host, as another plan has it."""
    states, kept = (
        tuple(name for name in names if name in made.parameters)
        for names in (plan.host_states, plan.host_parameters)
    )
    if not made.updates_what_it_keeps:
        kept = ()
    kinds = {kind for kind, names in ((OPTIMIZER, states), (PARAMETERS, kept)) if names}
    return replace(made, host_states=states, host_parameters=kept, offload=offload_text(kinds))


def carry_plan(
    plan: Plan,
    strategy: Strategy,
    record: Callable[[int], Recording],
    cluster: Cluster | None = None,
) -> Lowered:
    """A plan with the decisions of another for the model that `record` records, by a strategy.

    That gives the recording for a number of micro-batches of one dp rank's batch. Tensors are split
    and stages cut anew; what the strategy does not say is as in `plan`. Where each stage keeps what
    memory allows, that is the memory of `cluster`, or else half of what could be kept. What blocks
    keep is stretched over those that there are (`merakc.passes.recompute.segments`).

    Raises children of `MerakError` where the model does not allow it.
    """
    machines = cluster or plan.machines or NOMINAL_GPU
    lowered = make_plan(record(strategy.micro_batches), strategy, machines)
    made = lowered.plan
    like = _stages_like(plan, len(made.rank_of))
    if plan.keep_bytes:
        made = replace(made, keep_bytes=_kept(plan, lowered, like, cluster))
    made = _on_host_as(plan, made)
    if plan.kept_blocks:
        made = replace(made, kept_blocks=tuple(plan.kept_blocks[s] for s in like))
    if plan.host_activations:
        shares = tuple(plan.host_activations[s] for s in like)
        made = replace(
            made, host_activations=shares, machines=recorded_machines(machines, made.lanes)
        )
    lowered = replace(lowered, plan=made)
    if not plan.sub_batches or strategy.lanes == 1:
        return lowered
    given = plan.machines if cluster is None else recorded_machines(cluster, strategy.lanes)
    fuses = given is not None and given.symmetric_memory
    parted = replace(
        lowered.plan,
        sub_batches=tuple(plan.sub_batches[s] for s in like),
        row_chunks={n: count for n, count in plan.row_chunks.items() if n in made.parameters},
        fused_products=tuple(n for n in plan.fused_products if fuses and n in made.parameters),
        machines=given,
    )
    lowered = with_parts(replace(lowered, plan=parted), record)
    return replace(lowered, gains=overlap_gains(lowered))


def shards_like(plan: Plan, strategy: Strategy, counts: Mapping[int, int]) -> Strategy:
    """The strategy with the state sharded as in a plan, stage by stage, with another number
    of shards for each that the plan has.
    """
    if not plan.state_shards or strategy.state_ranks == 1:
        return replace(strategy, state_shards=())
    like = _stages_like(plan, len(plan.rank_of) if strategy.order else strategy.stage_count)
    every = (plan.shards(stage) for stage in like)
    shards = (
        replace(
            one,
            parameters=counts[one.parameters],
            gradients=counts[one.gradients],
            optimizer=counts[one.optimizer],
        )
        for one in every
    )
    return replace(strategy, state_shards=tuple(shards))


def _stages_like(plan: Plan, stages: int) -> list[int]:
    """The plan's stage for each of so many."""
    return [stage * len(plan.rank_of) // stages for stage in range(stages)]


def _kept(
    plan: Plan, lowered: Lowered, like: list[int], cluster: Cluster | None
) -> tuple[int, ...]:
    """What each stage may keep of a micro-batch."""
    costs = planned_costs(lowered, cluster or plan.machines or NOMINAL_GPU)
    if cluster is not None:
        # Any number will do for the order of work; what it says is asked for.
        some = replace(lowered.plan, keep_bytes=(0,) * len(like))
        schedule = replace(lowered, plan=some).schedule
        return keep_bytes(schedule, costs, rank_memory_bytes(cluster, lowered.plan.mesh))
    half = [(c.checkpoint_bytes + c.saved_bytes) // 2 for c in costs]
    return tuple(b if plan.keep_bytes[s] >= 0 else -1 for b, s in zip(half, like, strict=True))
