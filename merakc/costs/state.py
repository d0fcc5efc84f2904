"""What sharding the state of a stage over dp costs: bytes of each rank, and exposed seconds.

The seconds are those of a walk along one rank's step with two streams, of computing and of
communicating. What communication is waited for is exposed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate

from merakc.analysis.buckets import BUCKET_BYTES, LEAST_BUCKETS, LEAST_BYTES
from merakc.costs.fabric import Fabric, all_gather_seconds, all_reduce_seconds, shard_group
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
    of_experts: bool = False


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
    and kernels compete for multiprocessors and memory. The state of `experts` is sharded over fewer
    ranks, if these are given.
    """

    dp: int
    fabric: Fabric
    stride: int = 1
    overlap: float = 1.0
    experts: DpGroup | None = None

    def of(self, shards: StateShards, *, of_experts: bool) -> tuple[StateShards, DpGroup]:
        """The shards and the ranks of a part of the state."""
        if not of_experts or self.experts is None:
            return shards, self
        return shards.within(self.experts.dp), self.experts


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
    walk = _Walk.of(layers, shards, group, precision)
    for _ in range(micro_batches - 1):
        walk.forward()
        walk.backward()
    walk.forward()
    exposed_s = walk.end()
    parameters = sum(layer.parameters for layer in layers)
    computed_s = micro_batches * sum(layer.forward_s + layer.backward_s for layer in layers)
    state = 2 * precision.optimizer_bytes * -(-parameters // shards.optimizer)
    step_s = computed_s + exposed_s + state / optimizer_bytes_per_s
    return StateCost(step_s, exposed_s, walk.posted_s, state_bytes(parameters, shards, precision))


@dataclass(slots=True)
class _Walk:
    """A rank's step as far as it was walked: `posted_s` are the seconds of all communication so
    far, `done_s` of what of it has ended, `exposed_s` those waited for.

    Of each layer there are the seconds of its computing under which communication ends, of
    gathering it, of reducing its gradients after the last micro-batch, and after others; `ends`
    say when its parameters are there. Collectives run one after the other: each has ended once so
    many seconds of them have. Two layers are `held`.
    """

    forward_s: list[float]
    backward_s: list[float]
    gather_s: list[float]
    reduce_s: list[float]
    scatter_s: list[float]
    ends: list[float]
    posted_s: float
    done_s: float = 0.0
    exposed_s: float = 0.0
    held: tuple[int, ...] = (0,)

    @classmethod
    def of(
        cls, layers: Sequence[Layer], shards: StateShards, group: DpGroup, precision: Precision
    ) -> _Walk:
        """The walk of a rank with these layers, which begins with gathering the first."""
        counts = [(layer.parameters, layer.of_experts) for layer in layers]
        known = {
            (n, of_experts): collective_seconds(
                n, *group.of(shards, of_experts=of_experts), precision
            )
            for n, of_experts in set(counts)
        }
        gather_s, refresh_s, scatter_s, reduce_s = (
            [known[n][kind] for n in counts]
            for kind in (
                CollectiveKind.GATHER, CollectiveKind.REFRESH, CollectiveKind.SCATTER,
                CollectiveKind.REDUCE,
            )
        )  # fmt: skip
        ends = list(accumulate(refresh_s))
        if gather_s[0]:
            ends[0] = ends[-1] + gather_s[0]
        return cls(
            [group.overlap * layer.forward_s for layer in layers],
            [group.overlap * layer.backward_s for layer in layers],
            gather_s, reduce_s, scatter_s, ends, max(ends[0], ends[-1]),
        )  # fmt: skip

    def fork(self) -> _Walk:
        """Another walk, which goes on from here."""
        return replace(self, ends=[*self.ends])

    def forward(self) -> None:
        """Goes through the layers."""
        self._go(range(len(self.ends)), self.forward_s, None)

    def backward(self) -> None:
        """Goes back through them, of a micro-batch that is not the last."""
        self._go(range(len(self.ends) - 1, -1, -1), self.backward_s, self.scatter_s)

    def end(self) -> float:
        """Goes back for the last time; the exposed seconds of the step."""
        self._go(range(len(self.ends) - 1, -1, -1), self.backward_s, self.reduce_s)
        return self.exposed_s + (self.posted_s - self.done_s)

    def _go(
        self, order: Sequence[int], under_s: Sequence[float], posts_s: Sequence[float] | None
    ) -> None:
        """Goes through layers, of which the one behind is gathered before each, if it is not
        held.
        """
        posted_s, done_s, exposed_s, held = self.posted_s, self.done_s, self.exposed_s, self.held
        gather_s, ends = self.gather_s, self.ends
        for k, then in zip(order, [*order[1:], order[-1]], strict=True):
            if gather_s[then] and then not in held:
                posted_s += gather_s[then]
                ends[then], held = posted_s, (k, then)
            if ends[k] > done_s:
                exposed_s += ends[k] - done_s
                done_s = ends[k]
            done_s += under_s[k]
            if done_s > posted_s:
                done_s = posted_s
            if posts_s is not None:
                posted_s += posts_s[k]
        self.posted_s, self.done_s, self.exposed_s, self.held = posted_s, done_s, exposed_s, held


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
    total = micro_batches if shards.gradients > 1 else 1
    met = min(total, STEADY)
    walk, ended = _Walk.of(layers, shards, group, precision), list[float]()
    for left in reversed(range(met)):
        walk.forward()
        if left <= (total > met):  # of a step of one fewer, too
            ended.append(walk.fork().end())
        if left:
            walk.backward()
    return ended[-1] + (total - met) * (ended[-1] - ended[0])


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


def in_buckets(layers: Sequence[Layer], kept_bytes: int, scale: int = 1) -> list[Layer]:
    """The layers of which parameters travel together, as `plan_buckets` joins tensors: `layers`
    are one each, of `kept_bytes` an element where it is updated; in buckets `scale` times as large,
    of experts or of others. Each has the seconds since the one before it.
    """
    kinds = (False, True)
    total = {k: sum(own.parameters for own in layers if own.of_experts is k) for k in kinds}
    shares = {k: max(LEAST_BYTES, kept_bytes * n // LEAST_BUCKETS) for k, n in total.items()}
    found: list[Layer] = []
    parameters, forward_s, backward_s = dict.fromkeys(kinds, 0), 0.0, 0.0
    for layer in layers:
        kind = layer.of_experts
        most = min(BUCKET_BYTES * scale, shares[kind])
        if parameters[kind] and kept_bytes * (parameters[kind] + layer.parameters) > most:
            found.append(Layer(parameters[kind], forward_s, backward_s, kind))
            parameters[kind], forward_s, backward_s = 0, 0.0, 0.0
        parameters[kind] += layer.parameters
        forward_s, backward_s = forward_s + layer.forward_s, backward_s + layer.backward_s
    if parameters[True]:
        found.append(Layer(parameters[True], 0.0, 0.0, of_experts=True))
    return [*found, Layer(parameters[False], forward_s, backward_s)]
