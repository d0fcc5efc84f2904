"""What sharding the state of a stage over dp costs: bytes of each rank, and exposed seconds.

The seconds are those of a walk along one rank's step with two streams, of computing and of
communicating. What communication is waited for is exposed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from merakc.analysis.buckets import BUCKET_BYTES, LEAST_BUCKETS, LEAST_BYTES
from merakc.costs.fabric import Fabric, all_gather_seconds, all_reduce_seconds, shard_group
from merakc.ir.program import CollectiveKind
from merakc.ir.state import UNSHARDED, StateShards


@dataclass(frozen=True, slots=True)
class Precision:
    """Bytes of a parameter: as computed with, its gradient, and what the optimizer keeps of it.

    The optimizer's are its states and, where it keeps one, its own copy in float32.
    """

    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int

    @property
    def kept_bytes(self) -> int:
        """Of an element as it is updated: of the optimizer's own copy, where it keeps one."""
        return max(self.parameter_bytes, self.optimizer_bytes // 3)


# ZeRO (Rajbhandari et al. 2020, section 3.1): parameters and gradients in 16 bits; a float32 copy
# and Adam's two states.
MIXED = Precision(2, 2, 12)


# So many micro-batches of a rank, and so many times the ranks of a pipeline, are walked through;
# what a further one takes is what the last of them took.
STEADY = 4


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

    Parameters are gathered one layer ahead, in every forward and backward where they are sharded;
    of two neighbours that are gathered, none is gathered again. Gradients that are sharded are
    reduced after every micro-batch, others after the last. What the optimizer wrote is gathered
    under the next forward. The optimizer reads and writes its state at `optimizer_bytes_per_s`.
    """
    parameters = sum(layer.parameters for layer in layers)
    known = {
        count: collective_seconds(count, shards, group, precision)
        for count in {layer.parameters for layer in layers}
    }
    gather_s, refresh_s, scatter_s, reduce_s = (
        [known[layer.parameters][kind] for layer in layers]
        for kind in (
            CollectiveKind.GATHER, CollectiveKind.REFRESH, CollectiveKind.SCATTER,
            CollectiveKind.REDUCE,
        )
    )  # fmt: skip
    # Collectives run one after the other: each has ended once so many seconds of them have.
    ends = list(accumulate(refresh_s))
    posted_s, done_s, exposed_s, computed_s = ends[-1], 0.0, 0.0, 0.0
    if gather_s[0]:
        ends[0] = posted_s = posted_s + gather_s[0]
    order = [*range(len(layers))], [*reversed(range(len(layers)))]
    uses = [(j, k, is_backward) for j in range(micro_batches) for is_backward in (False, True)
            for k in order[is_backward]]  # fmt: skip
    held: tuple[int, ...] = (0,)
    for place, (j, k, is_backward) in enumerate(uses):
        then = uses[place + 1][1] if place + 1 < len(uses) else k
        if gather_s[then] and then not in held:
            posted_s += gather_s[then]
            ends[then], held = posted_s, (k, then)
        if ends[k] > done_s:
            exposed_s += ends[k] - done_s
            done_s = ends[k]
        compute_s = layers[k].backward_s if is_backward else layers[k].forward_s
        computed_s += compute_s
        done_s = min(posted_s, done_s + group.overlap * compute_s)
        if is_backward:
            posted_s += (reduce_s if j == micro_batches - 1 else scatter_s)[k]
    exposed_s += posted_s - done_s
    state = 2 * precision.optimizer_bytes * -(-parameters // shards.optimizer)
    step_s = computed_s + exposed_s + state / optimizer_bytes_per_s
    return StateCost(step_s, exposed_s, posted_s, state_bytes(parameters, shards, precision))


def exposed_seconds(
    layers: Sequence[Layer],
    micro_batches: int,
    shards: StateShards,
    group: DpGroup,
    precision: Precision,
) -> float:
    """The exposed seconds of `state_cost`.

    Only the first and the last micro-batch meet communication, unless each one does: then those in
    between wait equally long.
    """

    def exposed_s(count: int) -> float:
        return state_cost(layers, count, shards, group, precision).exposed_s

    total = micro_batches if shards.gradients > 1 else 1
    met = min(total, STEADY)
    found_s = exposed_s(met)
    return found_s + (total - met) * (found_s - exposed_s(met - 1)) if total > met else found_s


@lru_cache(maxsize=1 << 14)
def collective_seconds(
    parameters: int, shards: StateShards, group: DpGroup, precision: Precision = MIXED
) -> Mapping[CollectiveKind, float]:
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


def in_buckets(
    layers: Sequence[Layer], kept_bytes: int, shards: StateShards = UNSHARDED
) -> list[Layer]:
    """The layers of which parameters travel together, as `plan_buckets` joins tensors: `layers`
    are one each, of `kept_bytes` an element where it is updated.
    """
    total = sum(layer.parameters for layer in layers)
    share = max(LEAST_BYTES, kept_bytes * total // LEAST_BUCKETS)
    most = min(BUCKET_BYTES * shards.bucket_scale, share)
    found: list[Layer] = []
    parameters, forward_s, backward_s = 0, 0.0, 0.0
    for layer in layers:
        if parameters and kept_bytes * (parameters + layer.parameters) > most:
            found.append(Layer(parameters, forward_s, backward_s))
            parameters, forward_s, backward_s = 0, 0.0, 0.0
        parameters += layer.parameters
        forward_s, backward_s = forward_s + layer.forward_s, backward_s + layer.backward_s
    return [*found, Layer(parameters, forward_s, backward_s)]
