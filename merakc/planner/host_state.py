"""Which parameters are updated on the host: those that a plan is asked to, or no more than what its
devices have no room for, tensor by tensor.

Of a rank those go first whose first reader is last: their gradients are there first, and the
updated values are read last. A byte costs each of them the same seconds otherwise.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from merakc.analysis.buckets import Held, parameters_in_order, plan_buckets
from merakc.costs.ranks import rank_memory_bytes
from merakc.costs.work.sharded import state_bytes
from merakc.errors import ConfigError
from merakc.ir.offload import ACTIVATIONS, OPTIMIZER, offload_text, parse_offload
from merakc.ir.plan import Plan
from merakc.ir.precision import kept_dtype
from merakc.lowering.lowered import Lowered
from merakc.lowering.predict import predict
from merakc.machines.cluster import Cluster
from merakc.machines.links import Host
from merakc.report.units import format_bytes

# How often what is missing is looked for again: buckets are cut otherwise on both sides.
ROUNDS = 4
# A parameter's bytes on the device that leave it, and those that it takes on the host.
_Sizes = tuple[int, int]


def with_host_states(lowered: Lowered, asked: str, cluster: Cluster) -> Lowered:
    """The plan with the optimizer's state on the host that is asked for, and its prediction. As
    needed, that without which it does not fit; the plan as it is, where it fits or nothing helps.

    Raises `ConfigError` where machines say nothing of a host, or it has too little memory.
    """
    offload = parse_offload(asked)
    if not offload.may(OPTIMIZER):
        return lowered
    if offload.as_needed:
        return _as_needed(lowered, cluster)
    sizes = _sizes(lowered)
    budget = [offload.size_bytes] * len(sizes)
    names = {n for own, most in zip(sizes, budget, strict=True) for n in _within(own, most)}
    return _checked(_predicted(lowered, names, cluster), cluster)


def _as_needed(lowered: Lowered, cluster: Cluster) -> Lowered:
    host = cluster.host
    if host is None:
        return lowered
    memory = rank_memory_bytes(cluster, lowered.plan.mesh)
    sizes, found = _sizes(lowered), lowered
    lacks = [0] * len(sizes)
    for _ in range(ROUNDS):
        assert found.prediction is not None
        over = [p - m for p, m in zip(found.prediction.peak_bytes, memory, strict=True)]
        if max(over) <= 0:
            return found if _on_host(found.plan, sizes) <= host.memory_bytes else lowered
        lacks = [a + max(b, 0) for a, b in zip(lacks, over, strict=True)]
        if any(
            need > sum(b for b, _ in own.values()) for need, own in zip(lacks, sizes, strict=True)
        ):
            break  # not even all of it is enough
        names = {n for own, need in zip(sizes, lacks, strict=True) for n in _freeing(own, need)}
        found = _predicted(lowered, names, cluster)
    return lowered


def all_on_host(lowered: Lowered, asked: str, cluster: Cluster) -> Lowered | None:
    """The plan with the state of all trained parameters on the host, without its prediction; None
    where that is not asked for, or there is no room.
    """
    offload, sizes = parse_offload(asked), _sizes(lowered)
    if not offload.may(OPTIMIZER) or offload.size_bytes is not None or cluster.host is None:
        return None
    plan = _moving(lowered.plan, {name for own in sizes for name in own})
    if _on_host(plan, sizes) > cluster.host.memory_bytes:
        return None
    return replace(lowered, plan=plan, prediction=None)


def _checked(lowered: Lowered, cluster: Cluster) -> Lowered:
    host = host_of(cluster)
    need = _on_host(lowered.plan, _sizes(lowered))
    if need > host.memory_bytes:
        raise ConfigError(
            f"offload: a rank moves {format_bytes(need)} to its host, of which it may use "
            f"{format_bytes(host.memory_bytes)}; give how much it may move, as 'optimizer, "
            f"{host.memory_bytes >> 30} GiB', or shard the state"
        )
    return lowered


def host_of(cluster: Cluster) -> Host:
    """The memory beside the devices. Raises `ConfigError` where nothing is said of it."""
    if cluster.host is None:
        raise ConfigError(
            f"offload: of {cluster.name} nothing is known of the memory beside the devices; add "
            "[nodes.host] to the cluster file (docs/cluster-files.md), or leave offload='none'"
        )
    return cluster.host


def _predicted(lowered: Lowered, names: Collection[str], cluster: Cluster) -> Lowered:
    """The plan that updates these on the host, with what it costs."""
    made = replace(lowered, plan=_moving(lowered.plan, names))
    return replace(made, prediction=predict(made, cluster, dp_rank=0)[0])


def _moving(plan: Plan, names: Collection[str]) -> Plan:
    kinds = {OPTIMIZER} if names else set[str]()
    if ACTIVATIONS in plan.offload:
        kinds.add(ACTIVATIONS)
    return replace(plan, host_states=tuple(sorted(names)), offload=offload_text(kinds))


def _sizes(lowered: Lowered) -> list[dict[str, _Sizes]]:
    """By pipeline rank, what its trained parameters are on device and host, those first that go
    first.
    """
    plan = lowered.plan
    found: list[dict[str, _Sizes]] = [{} for _ in range(plan.pp)]
    for stage in reversed(range(len(plan.rank_of))):
        for held in reversed(list(_held(lowered, stage))):
            here, there = (
                state_bytes(
                    plan_buckets([replace(held, on_host=on_host)], plan.shards), plan.precision
                )
                for on_host in (False, True)
            )
            own = here.kept_bytes - there.kept_bytes  # gradients are there until they are reduced
            found[plan.rank_of[stage]].setdefault(held.name, (own, there.host_bytes))
    return found


def _held(lowered: Lowered, stage: int) -> Iterator[Held]:
    """The parameters that a stage trains, in the order of their first use."""
    plan = lowered.plan
    for item in lowered.stages.local[stage].told(parameters_in_order):
        if item.requires_grad:
            dtype = kept_dtype(item.spec.dtype, plan.precision, is_trained=True)
            yield Held(item.target, dtype, item.spec.numel, plan.parameters[item.target], True)


def _within(sizes: Mapping[str, _Sizes], most_bytes: int | None) -> Iterator[str]:
    """Those that fit so many bytes of the host."""
    left = most_bytes
    for name, (_, there) in sizes.items():
        if left is None:
            yield name
        elif there <= left:
            left -= there
            yield name


def _freeing(sizes: Mapping[str, _Sizes], need_bytes: int) -> Sequence[str]:
    """Those whose leaving frees so many bytes of the device: none of them could stay."""
    chosen: list[str] = []
    spare = -need_bytes
    for name, (own, _) in sizes.items():
        if spare >= 0:
            break
        chosen.append(name)
        spare += own
    for name in sorted(chosen, key=lambda n: -sizes[n][0]):
        if sizes[name][0] <= spare:
            chosen.remove(name)
            spare -= sizes[name][0]
    return chosen


def _on_host(plan: Plan, sizes: Sequence[Mapping[str, _Sizes]]) -> int:
    """The most that a rank has on its host."""
    return max(sum(own[n][1] for n in plan.host_states if n in own) for own in sizes)
