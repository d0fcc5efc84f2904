"""What the computes of a stage cost, from its graphs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from merakc.costs.device import Place, backward_seconds, forward_seconds
from merakc.costs.nodes import graph_seconds
from merakc.costs.work.kernels import graph_work
from merakc.costs.work.memory import ActionBytes, Sum, order_bytes
from merakc.costs.work.sharded import StateBytes, graph_state_bytes
from merakc.ir.costs import StageCost
from merakc.ir.graph import Graph, Input, InputKind
from merakc.ir.offload import NOWHERE, OnHost
from merakc.ir.precision import Precision
from merakc.ir.program import ActionKind, StageGraphs
from merakc.ir.state import UNSHARDED, StateShards

NO_OTHERS: Mapping[str, StateShards] = MappingProxyType({})
_F, _B, _I, _W, _R = (
    ActionKind.FORWARD,
    ActionKind.BACKWARD,
    ActionKind.INPUT_GRAD,
    ActionKind.WEIGHT_GRAD,
    ActionKind.RECOMPUTE,
)


def stage_cost(
    chunk: StageGraphs,
    place: Place,
    shards: StateShards = UNSHARDED,
    precision: Precision | None = None,
    others: Mapping[str, StateShards] = NO_OTHERS,
    *,
    on_host: OnHost = NOWHERE,
    fused: bool = False,
    in_buckets: bool = False,
) -> StageCost:
    """The cost of a stage from its own graphs; of pieces that were not made, nothing.

    The parameters of `others` are in other shards: as another stage has them, or of experts.
    `fused` calls add no gradients to those that are there. Of parameters `in_buckets` these are
    added to their bucket, which is among the static bytes, as soon as they are made.
    """
    factors = place.factors
    held = frozenset(i.target for i in chunk.forward.inputs if i.kind is InputKind.PARAMETER)
    sums = (Sum(held, size_bytes=0),) if in_buckets else ()

    def seconds(graph: Graph | None, factor: float = factors.backward) -> float:
        return graph_seconds(graph, place, factor) if graph else 0.0

    def bytes_of(*order: ActionKind) -> tuple[ActionBytes, ...]:
        return order_bytes(chunk, order, sums, later=True, fused=fused)

    forward, backward = bytes_of(_F, _B)
    again = bytes_of(_F, _R, _B) if chunk.checkpoint else None
    split = bytes_of(_F, _I, _W) if chunk.weight_grad else None
    return StageCost(
        forward_s=seconds(chunk.forward, factors.forward),
        backward_s=seconds(chunk.backward),
        input_grad_s=seconds(chunk.input_grad),
        weight_grad_s=seconds(chunk.weight_grad),
        recompute_s=seconds(chunk.recompute, factors.forward),
        saved_bytes=forward.held_bytes,
        checkpoint_bytes=again[0].held_bytes if again else 0,
        deferred_bytes=split[1].held_bytes if split else 0,
        forward_peak_bytes=forward.peak_bytes,
        backward_peak_bytes=backward.peak_bytes,
        input_grad_peak_bytes=split[1].peak_bytes if split else 0,
        checkpoint_peak_bytes=again[0].peak_bytes if again else 0,
        recompute_peak_bytes=again[1].peak_bytes if again else 0,
        weight_peak_bytes=split[2].peak_bytes if split else 0,
        static_bytes=static_bytes(chunk.forward, shards, precision, others, on_host),
        reduced_bytes=reduced_bytes(chunk.forward, shards, precision, others, on_host),
        waist_bytes=sum(m.size_bytes for m in forward.waist - forward.held),
        host_bytes=forward.host_bytes,
        deferred_host_bytes=split[1].host_bytes if split else 0,
    )


def with_seconds(cost: StageCost, seconds: Mapping[ActionKind, float]) -> StageCost:
    """The cost with the times of some computes replaced, by measured ones."""
    return replace(
        cost,
        forward_s=seconds.get(_F, cost.forward_s),
        backward_s=seconds.get(_B, cost.backward_s),
        input_grad_s=seconds.get(_I, cost.input_grad_s),
        weight_grad_s=seconds.get(_W, cost.weight_grad_s),
        recompute_s=seconds.get(_R, cost.recompute_s),
        head_s=seconds.get(ActionKind.HEAD, cost.head_s),
    )


def with_messages(cost: StageCost, there_s: float, back_s: float) -> StageCost:
    """The cost with what its messages take of the core that computes: those of its forward, and
    those of its gradients.
    """
    return replace(
        cost,
        forward_s=cost.forward_s + there_s,
        backward_s=cost.backward_s + back_s,
        input_grad_s=cost.input_grad_s + back_s,
    )


def faster(cost: StageCost, share: float) -> StageCost:
    """The cost with every compute taking only a share of its seconds."""
    return replace(
        cost,
        forward_s=cost.forward_s * share,
        backward_s=cost.backward_s * share,
        input_grad_s=cost.input_grad_s * share,
        weight_grad_s=cost.weight_grad_s * share,
        recompute_s=cost.recompute_s * share,
    )


def with_state(
    cost: StageCost,
    graph: Graph,
    shards: StateShards,
    precision: Precision | None = None,
    others: Mapping[str, StateShards] = NO_OTHERS,
    on_host: OnHost = NOWHERE,
) -> StageCost:
    """The cost of a stage with its state in these shards, and some of it on the host."""
    return replace(
        cost,
        static_bytes=static_bytes(graph, shards, precision, others, on_host, cost.read_bytes),
        reduced_bytes=reduced_bytes(graph, shards, precision, others, on_host),
    )


def rough_seconds(local: Graph, place: Place) -> tuple[float, float]:
    """Seconds of a forward, and of the backward that it will have."""
    work = local.told(graph_work)
    return forward_seconds(work, place), backward_seconds(work, place)


def static_bytes(
    graph: Graph,
    shards: StateShards = UNSHARDED,
    precision: Precision | None = None,
    others: Mapping[str, StateShards] = NO_OTHERS,
    on_host: OnHost = NOWHERE,
    read_bytes: int = 0,
) -> int:
    """Parameters, buffers and constants; gradients and optimizer state of the trained ones.

    Whole buckets that are gathered or filled are counted all along, gradients as they are while
    micro-batches run: `reduced_bytes` is what they take more in the end, or less. A graph has
    `read_bytes` of parameters in use at once.
    """
    whole_bytes = sum(
        i.spec.size_bytes
        for i in graph.inputs
        if i.kind in (InputKind.BUFFER, InputKind.CONSTANT) or _is_whole(i, shards, on_host)
    )
    state = _state(graph, shards, precision, others, on_host, read_bytes)
    held = state.kept_bytes + state.gathered_bytes
    return whole_bytes + held + state.summed_bytes + state.filling_bytes


def reduced_bytes(
    graph: Graph,
    shards: StateShards = UNSHARDED,
    precision: Precision | None = None,
    others: Mapping[str, StateShards] = NO_OTHERS,
    on_host: OnHost = NOWHERE,
) -> int:
    """What the reduced gradients take more than those of the micro-batches."""
    state = _state(graph, shards, precision, others, on_host)
    return state.reduced_bytes - state.summed_bytes - state.filling_bytes


def _state(
    graph: Graph,
    shards: StateShards,
    precision: Precision | None,
    others: Mapping[str, StateShards],
    on_host: OnHost,
    read_bytes: int = 0,
) -> StateBytes:
    """What buckets of the stage's parameters hold; told once of each way to shard them."""
    if others or on_host or read_bytes:
        return graph_state_bytes(graph, shards, precision, others, on_host, read_bytes)
    return graph.told(graph_state_bytes, shards, precision)


def _is_whole(item: Input, shards: StateShards, on_host: OnHost) -> bool:
    """Whether it is a parameter that is in no bucket."""
    is_frozen = item.kind is InputKind.PARAMETER and not item.requires_grad
    return is_frozen and shards.parameters == 1 and item.target not in on_host.kept
