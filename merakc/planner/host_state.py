"""Which parameters are updated on the host, or kept there: those that a plan is asked to, or no
more than what its devices have no room for, tensor by tensor.

Of a rank those go first whose first reader is last: their gradients are there first, and the
updated values are read last. A byte costs each of them the same seconds otherwise. What the device
computes with stays there as long as it has room without the rest: it is read in every micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from merakc.analysis.buckets import Held, parameters_in_order, plan_buckets
from merakc.costs.ranks import rank_memory_bytes
from merakc.costs.work.sharded import state_bytes
from merakc.errors import ConfigError
from merakc.ir.offload import ACTIVATIONS, OPTIMIZER, PARAMETERS, offload_text, parse_offload
from merakc.ir.precision import kept_dtype
from merakc.lowering.lowered import Lowered
from merakc.lowering.predict import predict
from merakc.machines.cluster import Cluster
from merakc.machines.links import Host
from merakc.report.units import format_bytes

# How often what is missing is looked for again: buckets are cut otherwise on both sides.
ROUNDS = 4
# Whether parameters are updated on the host, and whether they are kept there.
_Way = tuple[bool, bool]
HERE, UPDATED, KEPT = (False, False), (True, False), (True, True)
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
    keeps = offload.may(PARAMETERS)
    if keeps and not lowered.plan.updates_what_it_keeps:
        raise ConfigError(
            f"offload={asked!r} with state_shards={lowered.plan.state_shards[0]}: a rank updates "
            "what it keeps of parameters, where these come from its host; give as many shards of "
            "parameters as of optimizer state ('zero-0', 'zero-3'), leave state_shards out, or "
            "move the optimizer's state alone (offload='optimizer')"
        )
    sizes = _sizes(lowered, (HERE, KEPT if keeps else UPDATED))
    names = {n for own in sizes for n in _within(own, offload.size_bytes)}
    return _checked(_predicted(_moving(lowered, names, names if keeps else ()), cluster), cluster)


def _as_needed(lowered: Lowered, cluster: Cluster) -> Lowered:
    host = cluster.host
    if host is None:
        return lowered
    made = _freed(lowered, cluster, (HERE, UPDATED), lambda names: _moving(lowered, names))
    if made is None and lowered.plan.updates_what_it_keeps:
        every = _moving(lowered, _every(lowered))
        made = _freed(
            _predicted(every, cluster), cluster, (UPDATED, KEPT),
            lambda names: _moving(every, every.plan.host_states, names),
        )  # fmt: skip
    return lowered if made is None or host_need(made) > host.memory_bytes else made


def _freed(
    lowered: Lowered,
    cluster: Cluster,
    ways: tuple[_Way, _Way],
    moving: Callable[[Collection[str]], Lowered],
) -> Lowered | None:
    """What `moving` makes of the fewest parameters that fits, where each goes from one way to
    the other; None where not even all of them are enough.
    """
    memory = rank_memory_bytes(cluster, lowered.plan.mesh)
    sizes, found = _sizes(lowered, ways), lowered
    names, lacks = set[str](), [0] * len(sizes)
    every = moving({name for own in sizes for name in own})
    pairs = zip(_gathered_bytes(every), _gathered_bytes(lowered), strict=True)
    whole = [after - before for after, before in pairs]  # what is fetched, while it is read
    for _ in range(ROUNDS):
        assert found.prediction is not None
        over = [p - m for p, m in zip(found.prediction.peak_bytes, memory, strict=True)]
        if max(over) <= 0:
            return found
        lacks = [a + max(b, 0) for a, b in zip(lacks, over, strict=True)]
        each, before = list(zip(sizes, lacks, whole, strict=True)), names
        if any(lack > sum(b for b, _ in own.values()) for own, lack, _ in each):
            break
        names = {name for own, lack, more in each if lack for name in _freeing(own, lack + more)}
        if names == before:  # all have gone
            break
        found = _predicted(moving(names), cluster)
    return None


def all_on_host(lowered: Lowered, asked: str, cluster: Cluster) -> Lowered | None:
    """The plan with the state of all trained parameters on the host, without its prediction; None
    where that is not asked for, or there is no room.
    """
    offload = parse_offload(asked)
    if not offload.may(OPTIMIZER) or offload.size_bytes is not None or cluster.host is None:
        return None
    keeps = offload.may(PARAMETERS) and not offload.as_needed
    made = _moving(lowered, _every(lowered), _every(lowered) if keeps else ())
    return None if host_need(made) > cluster.host.memory_bytes else made


def _checked(lowered: Lowered, cluster: Cluster) -> Lowered:
    host = host_of(cluster)
    need = host_need(lowered)
    if need > host.memory_bytes:
        raise ConfigError(
            f"offload: a rank moves {format_bytes(need)} to its host, of which it may use "
            f"{format_bytes(host.memory_bytes)}; give how much it may move, as '{OPTIMIZER}, "
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


def _gathered_bytes(lowered: Lowered) -> list[int]:
    """What the devices of pipeline ranks have of parameters only while they are read."""
    precision = lowered.plan.precision
    return [state_bytes(own, precision).gathered_bytes for own in lowered.buckets]


def host_need(lowered: Lowered) -> int:
    """The most that a rank has on its host of parameters and what is kept of them."""
    precision = lowered.plan.precision
    return max(state_bytes(own, precision).host_bytes for own in lowered.buckets)


def _predicted(lowered: Lowered, cluster: Cluster) -> Lowered:
    """The plan with what it costs."""
    return replace(lowered, prediction=predict(lowered, cluster, dp_rank=0)[0])


def _moving(lowered: Lowered, updated: Collection[str], kept: Collection[str] = ()) -> Lowered:
    """The plan of which those of these parameters that are trained are updated on the host, and
    all of the second ones kept there; without its prediction.
    """
    trained = {i.target for g in lowered.stages.local for i in g.inputs if i.requires_grad}
    states = tuple(sorted(trained.intersection(updated)))
    kinds = {OPTIMIZER} if states else set[str]()
    kinds |= {PARAMETERS} if kept else set()
    if ACTIVATIONS in lowered.plan.offload:
        kinds.add(ACTIVATIONS)
    plan = replace(
        lowered.plan,
        host_states=states, host_parameters=tuple(sorted(kept)), offload=offload_text(kinds),
    )  # fmt: skip
    return replace(lowered, plan=plan, prediction=None)


def _every(lowered: Lowered) -> set[str]:
    """The parameters that graphs read."""
    graphs = lowered.stages.local
    return {item.target for graph in graphs for item in graph.told(parameters_in_order)}


def _sizes(lowered: Lowered, ways: tuple[_Way, _Way]) -> list[dict[str, _Sizes]]:
    """By pipeline rank, what its parameters are on device and host where they go from one way to
    another, those first that go first.
    """
    plan = lowered.plan
    found: list[dict[str, _Sizes]] = [{} for _ in range(plan.pp)]
    for stage in reversed(range(len(plan.rank_of))):
        for held in reversed(list(_held(lowered, stage))):
            here, there = (
                state_bytes(
                    plan_buckets([_in_way(held, way)], plan.shards, dp=plan.dp), plan.precision
                )
                for way in ways
            )
            # Gradients are there until they are reduced.
            own = here.kept_bytes - there.kept_bytes
            if there.host_bytes:
                found[plan.rank_of[stage]].setdefault(held.name, (own, there.host_bytes))
    return found


def _in_way(held: Held, way: _Way) -> Held:
    """A parameter where all are; frozen ones are not updated."""
    is_updated, is_kept = way
    return replace(held, on_host=is_updated and held.is_trained, fetched=is_kept)


def _held(lowered: Lowered, stage: int) -> Iterator[Held]:
    """The parameters of a stage, in the order of their first use."""
    plan, experts = lowered.plan, lowered.plan.of_experts
    for item in lowered.stages.local[stage].told(parameters_in_order):
        is_trained = item.requires_grad
        dtype = kept_dtype(item.spec.dtype, plan.precision, is_trained=is_trained)
        yield Held(
            item.target, dtype, item.spec.numel, plan.parameters[item.target], is_trained,
            of_experts=item.target in experts,
        )  # fmt: skip


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
