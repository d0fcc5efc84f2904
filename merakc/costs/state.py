"""What sharding the state of a stage over dp costs: bytes of each rank, and exposed seconds.

The seconds are those of a walk along one rank's step with two streams, of computing and of
communicating. What communication is waited for is exposed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from merakc.costs.fabric import Fabric, all_gather_seconds, all_reduce_seconds, shard_group
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
    walk = _Walk(group.overlap)
    comm = _Communication(shards, group, precision)
    forward = [(k, False) for k in range(len(layers))]
    order = [(j, *at) for j in range(micro_batches) for at in (*forward, *_backward(forward))]
    for k, layer in enumerate(layers):
        walk.post(("fresh", k), comm.refresh_s(layer))
    walk.post(0, comm.gather_s(layers[0]))
    for place, (j, k, is_backward) in enumerate(order):
        if place + 1 < len(order):
            walk.post(place + 1, comm.gather_s(layers[order[place + 1][1]]))
        walk.wait(("fresh", k))
        walk.wait(place)
        layer = layers[k]
        walk.compute(layer.backward_s if is_backward else layer.forward_s)
        if is_backward:
            walk.post(("reduced", j, k), comm.reduce_s(layer, last=j == micro_batches - 1))
    walk.wait_all()
    state = 2 * precision.optimizer_bytes * -(-parameters // shards.optimizer)
    step_s = walk.now_s + state / optimizer_bytes_per_s
    return StateCost(
        step_s, walk.exposed_s, walk.posted_s, state_bytes(parameters, shards, precision)
    )


def _backward(forward: Sequence[tuple[int, bool]]) -> list[tuple[int, bool]]:
    return [(k, True) for k, _ in reversed(forward)]


@dataclass(slots=True)
class _Communication:
    """Seconds of a layer's collectives."""

    shards: StateShards
    group: DpGroup
    precision: Precision

    def gather_s(self, layer: Layer) -> float:
        """Of the parameters that a layer computes with."""
        return self._gather(self.precision.parameter_bytes, layer, self.shards.parameters, 1)

    def refresh_s(self, layer: Layer) -> float:
        """Of the parameters that the optimizer wrote, to those that parameters are kept in."""
        size_bytes = self.precision.parameter_bytes
        return self._gather(size_bytes, layer, self.shards.optimizer, self.shards.parameters)

    def reduce_s(self, layer: Layer, *, last: bool) -> float:
        """Of the gradients of a micro-batch: scattered; after the last one, over all replicas."""
        size_bytes, shards = self.precision.gradient_bytes, self.shards
        seconds = self._gather(size_bytes, layer, shards.gradients, 1)
        if last:
            seconds += self._gather(size_bytes, layer, shards.optimizer, shards.gradients)
            replicas = shard_group(
                self.group.dp, shards.optimizer, self.group.fabric, self.group.stride
            )
            share = size_bytes * layer.parameters / shards.optimizer
            seconds += all_reduce_seconds(share, replicas, self.group.fabric)
        return seconds

    def _gather(self, size_bytes: int, layer: Layer, shards: int, before: int) -> float:
        """From `shards` to `before` shards, or the other way."""
        group = shard_group(shards, before, self.group.fabric, self.group.stride)
        return all_gather_seconds(size_bytes * layer.parameters / before, group, self.group.fabric)


@dataclass(slots=True)
class _Walk:
    """Two streams of one rank: computing, and communicating in the order of posting."""

    overlap: float
    now_s: float = 0.0
    exposed_s: float = 0.0
    posted_s: float = 0.0
    queue: deque[tuple[object, float]] = field(default_factory=deque)

    def post(self, key: object, seconds: float) -> None:
        """Starts a collective of that many seconds behind those that run already."""
        if seconds > 0:
            self.queue.append((key, seconds))
            self.posted_s += seconds

    def compute(self, seconds: float) -> None:
        """Computes, with the communication running beside it."""
        self.now_s += seconds
        budget_s = seconds * self.overlap
        while self.queue and budget_s > 0:
            key, left_s = self.queue.popleft()
            if left_s > budget_s:
                self.queue.appendleft((key, left_s - budget_s))
            budget_s -= left_s

    def wait(self, key: object) -> None:
        """Waits until a collective has ended, and those before it."""
        while any(key == other for other, _ in self.queue):
            _, left_s = self.queue.popleft()
            self.now_s += left_s
            self.exposed_s += left_s

    def wait_all(self) -> None:
        """Waits for all that runs."""
        while self.queue:
            self.wait(self.queue[-1][0])
