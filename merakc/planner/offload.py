"""How much of what stages keep for their backwards waits on the host, so that ranks fit.

Which values go first says `merakc.passes.offload`; here it is how many of a stage's bytes. Each
choice is predicted by the graphs that follow from it: copies that computing does not hide are in
the step's seconds, by which recomputation, another way to the same bytes, is held against it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from merakc.costs.ranks import rank_memory_bytes
from merakc.errors import ConfigError
from merakc.ir.offload import ACTIVATIONS, Offload, offload_text, parse_offload
from merakc.ir.plan_file import Prediction
from merakc.lowering.lowered import Lowered
from merakc.lowering.overlap import recorded_machines
from merakc.lowering.predict import predict
from merakc.machines.cluster import Cluster
from merakc.machines.links import Host
from merakc.report.units import format_bytes

# How often the interval in which a rank's least share lies is halved.
HALVINGS = 6
BY_ACTIONS = ("stage", "solved")  # recomputation by actions of the schedule


def with_moves(lowered: Lowered, asked: str, cluster: Cluster) -> Lowered:
    """The plan, with its prediction, of which as much waits on the host as is `asked` for: where
    that is only what a device has no room for, the least share of each rank with which it fits, or
    all where none does.

    Raises `ConfigError` where nothing is known of the host, or its memory is not enough.
    """
    offload, plan = parse_offload(asked), lowered.plan
    if not offload.may(ACTIVATIONS) or (offload.as_needed and plan.recompute in BY_ACTIONS):
        return lowered
    if plan.recompute in BY_ACTIONS:
        raise ConfigError(
            f"offload={asked!r} with recompute={plan.recompute!r}: what the schedule makes again "
            "does not wait on the host; ask for recompute 'none', 'selective', 'full' or a budget"
        )
    cluster = cluster.with_hardware(plan.mesh.world_size)
    if cluster.host is None:
        if offload.as_needed:
            return lowered
        raise ConfigError(
            f"offload={asked!r}: the cluster {cluster.name!r} does not say what memory there is "
            "beside its devices; add [nodes.host] to its file (docs/cluster-files.md)"
        )
    if offload.as_needed:
        return _as_needed(lowered, cluster, cluster.host)
    return _given(lowered, offload, cluster, cluster.host)


def _given(lowered: Lowered, offload: Offload, cluster: Cluster, host: Host) -> Lowered:
    """As much as a size allows, or all."""
    whole = _moved(lowered, [1.0] * lowered.plan.pp, cluster)
    most = host.memory_bytes if offload.size_bytes is None else offload.size_bytes
    if most > host.memory_bytes:
        raise ConfigError(
            f"offload of {format_bytes(most)}: a device may use {format_bytes(host.memory_bytes)} "
            "of its host's memory; ask for no more, or give a cluster whose hosts have it"
        )
    need = _prediction(whole).host_bytes
    if max(need) <= most:
        return whole
    return _moved(lowered, [min(1.0, most / max(own, 1)) for own in need], cluster)


def _as_needed(lowered: Lowered, cluster: Cluster, host: Host) -> Lowered:
    """The least with which each rank fits its device."""
    limits = rank_memory_bytes(cluster, lowered.plan.mesh)

    def fits(made: Lowered) -> list[bool]:
        peaks = _prediction(made).peak_bytes
        return [peak <= limit for peak, limit in zip(peaks, limits, strict=True)]

    alone = fits(lowered)
    if all(alone):
        return lowered
    need = _prediction(_moved(lowered, [1.0] * lowered.plan.pp, cluster)).host_bytes
    shares = [min(1.0, host.memory_bytes / max(own, 1)) for own in need]
    most = [0.0 if fitting else share for share, fitting in zip(shares, alone, strict=True)]
    return _least(lambda shares: _moved(lowered, shares, cluster), fits, most)


def _least(
    make: Callable[[Sequence[float]], Lowered],
    fits: Callable[[Lowered], list[bool]],
    most: Sequence[float],
) -> Lowered:
    """What is made of the least shares with which each rank fits; of `most`, where one does not."""
    low, high, best = [0.0] * len(most), list(most), make(most)
    if not all(fits(best)):
        return best
    for _ in range(HALVINGS):
        middle = [(a + b) / 2 for a, b in zip(low, high, strict=True)]
        made = make(middle)
        for rank, good in enumerate(fits(made)):
            (high if good else low)[rank] = middle[rank]
        if all(fits(made)):
            best = made
    made = make(high)
    return made if all(fits(made)) else best


def _moved(lowered: Lowered, of_rank: Sequence[float], cluster: Cluster) -> Lowered:
    """The plan with these shares of what the stages of each rank keep on the host."""
    plan = lowered.plan
    shares = tuple(of_rank[rank] for rank in plan.rank_of)
    kinds = set(parse_offload(plan.offload).kinds) | {ACTIVATIONS}
    if not any(shares):
        return lowered
    plan = replace(
        plan, offload=offload_text(kinds), host_activations=shares,
        machines=recorded_machines(cluster, plan.lanes),
    )  # fmt: skip
    made = replace(lowered, plan=plan)
    return replace(made, prediction=predict(made, cluster, dp_rank=0)[0])


def _prediction(lowered: Lowered) -> Prediction:
    assert lowered.prediction is not None
    return lowered.prediction
