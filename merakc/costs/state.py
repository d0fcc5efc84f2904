"""What sharding the state of a stage over dp costs: bytes of each rank, and exposed seconds.

The seconds are those of a walk along one rank's step with two streams, of computing and of
communicating. What communication is waited for is exposed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from merakc.analysis.buckets import BUCKET_BYTES, LEAST_BUCKETS, LEAST_BYTES
from merakc.costs.fabric import Fabric, all_gather_seconds, all_reduce_seconds, shard_group
from merakc.costs.streams import Streams
from merakc.ir.program import CollectiveKind
from merakc.ir.state import StateShards


@dataclass(frozen=True, slots=True)
class Precision:
    """Bytes of a parameter: as computed with, its gradient, and what the optimizer keeps of it.

    The optimizer's are its states and, where it keeps one, its own copy in float32.
    """

    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int


# ZeRO (Rajbhandari et al. 2020, section 3.1): parameters and gradients in 16 bits; a float32 copy
# and Adam's two states.
MIXED = Precision(2, 2, 12)


@dataclass(frozen=True, slots=True)
class Layer:
    """What is gathered and reduced together: parameters, and seconds of a micro-batch."""

    parameters: int
    forward_s: float
    backward_s: float


@dataclass(frozen=True, slots=True)
class StateCost:
    """Seconds of a step of one rank, how many of them wait for communication, and state bytes."""

    step_s: float
    exposed_s: float
    communication_s: float
    state_bytes: int


@dataclass(frozen=True, slots=True)
class DpGroup:
    """The ranks over which the state is sharded, `stride` apart, and what links them.

    While a rank computes, its communication runs at the share `overlap` of its speed: collectives
    and kernels compete for multiprocessors and memory.
    """

    dp: int
    fabric: Fabric
    stride: int = 1
    overlap: float = 1.0


def state_bytes(parameters: int, shards: StateShards, precision: Precision = MIXED) -> int:
    """Bytes that a rank holds between two steps: 2P / s_p + 2P / s_g + 12P / s_os if mixed."""
    shares = (
        (precision.parameter_bytes, shards.parameters),
        (precision.gradient_bytes, shards.gradients),
        (precision.optimizer_bytes, shards.optimizer),
    )
    return sum(size_bytes * -(-parameters // count) for size_bytes, count in shares)


def state_cost(
    layers: Sequence[Layer],
    micro_batches: int,
    shards: StateShards,
    group: DpGroup,
    precision: Precision = MIXED,
    *,
    optimizer_bytes_per_s: float = float("inf"),
) -> StateCost:
    """One step of a rank in the steady state, forward to forward.

    Parameters are gathered one layer ahead, in every forward and backward where they are sharded.
    Gradients that are sharded are reduced after every micro-batch, others after the last. What the
    optimizer wrote is gathered under the next forward. The optimizer reads and writes its state at
    `optimizer_bytes_per_s`.
    """
    parameters = sum(layer.parameters for layer in layers)
    seconds = [collective_seconds(layer.parameters, shards, group, precision) for layer in layers]
    walk = Streams(group.overlap)
    forward = [(k, False) for k in range(len(layers))]
    order = [(j, *at) for j in range(micro_batches) for at in (*forward, *_backward(forward))]
    for k in range(len(layers)):
        walk.post(("fresh", k), seconds[k][CollectiveKind.REFRESH])
    walk.post(0, seconds[0][CollectiveKind.GATHER])
    for place, (j, k, is_backward) in enumerate(order):
        if place + 1 < len(order):
            walk.post(place + 1, seconds[order[place + 1][1]][CollectiveKind.GATHER])
        walk.wait([("fresh", k), place])
        layer = layers[k]
        walk.compute(layer.backward_s if is_backward else layer.forward_s)
        if is_backward:
            is_last = j == micro_batches - 1
            kind = CollectiveKind.REDUCE if is_last else CollectiveKind.SCATTER
            walk.post(("reduced", j, k), seconds[k][kind])
    walk.wait()
    state = 2 * precision.optimizer_bytes * -(-parameters // shards.optimizer)
    step_s = walk.now_s + state / optimizer_bytes_per_s
    return StateCost(
        step_s, walk.exposed_s, walk.posted_s, state_bytes(parameters, shards, precision)
    )


def _backward(forward: Sequence[tuple[int, bool]]) -> list[tuple[int, bool]]:
    return [(k, True) for k, _ in reversed(forward)]


def collective_seconds(
    parameters: int, shards: StateShards, group: DpGroup, precision: Precision = MIXED
) -> dict[CollectiveKind, float]:
    """Seconds of each collective of so many parameters.

    Those that the optimizer wrote are gathered to the shards of parameters, these to whole
    parameters. A micro-batch's gradients are scattered; after the last one they are reduced to what
    is optimized, and over all replicas.
    """

    def gather_s(size_bytes: int, shards_from: int, shards_to: int) -> float:
        found = shard_group(shards_from, shards_to, group.fabric, group.stride)
        return all_gather_seconds(size_bytes * parameters / shards_to, found, group.fabric)

    replicas = shard_group(group.dp, shards.optimizer, group.fabric, group.stride)
    share = precision.gradient_bytes * parameters / shards.optimizer
    scatter_s = gather_s(precision.gradient_bytes, shards.gradients, 1)
    return {
        CollectiveKind.REFRESH: gather_s(
            precision.parameter_bytes, shards.optimizer, shards.parameters
        ),
        CollectiveKind.GATHER: gather_s(precision.parameter_bytes, shards.parameters, 1),
        CollectiveKind.SCATTER: scatter_s,
        CollectiveKind.REDUCE: scatter_s
        + gather_s(precision.gradient_bytes, shards.optimizer, shards.gradients)
        + all_reduce_seconds(share, replicas, group.fabric),
    }


def in_buckets(layers: Sequence[Layer], parameter_bytes: int) -> list[Layer]:
    """The layers of which parameters travel together, as `plan_buckets` joins small ones."""
    total = sum(layer.parameters for layer in layers)
    most = min(BUCKET_BYTES, max(LEAST_BYTES, parameter_bytes * total // LEAST_BUCKETS))
    found: list[Layer] = []
    for layer in layers:
        if found and parameter_bytes * (found[-1].parameters + layer.parameters) <= most:
            last = found.pop()
            layer = Layer(
                last.parameters + layer.parameters, last.forward_s + layer.forward_s,
                last.backward_s + layer.backward_s,
            )  # fmt: skip
        found.append(layer)
    return found
