"""How a stage's parameters, gradients and optimizer state are sharded over dp, and cp or ep."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from merakc.errors import ConfigError
from merakc.files.printable import count_of


class Role(StrEnum):
    """Why ranks have a process group: what they do together for the state that they share."""

    GATHER = "gather"  # have the shards of the same parameters
    REFRESH = "refresh"  # optimize the same shard of the parameters
    BLOCK = "block"  # have the shards of the same optimizer state
    REPLICAS = "replicas"  # have the same shard of the optimizer state


@dataclass(frozen=True, slots=True, order=True)
class StateShards:
    """The number of shards of parameters, gradients and optimizer state (AMSP, arXiv 2311.00257).

    Each divides the next, and gradients are as many as one of the two others. 1, 1, 1 is data
    parallelism; of n ranks 1, 1, n is ZeRO-1, 1, n, n ZeRO-2 and n, n, n ZeRO-3 or FSDP, and
    n / k, n / k, n / k MiCS or HSDP. A shard's holders are neighbours, so that shards stay
    inside a node first; the n / shards groups of holders are replicas.

    Parameters travel in buckets (`merakc.analysis.buckets`) `bucket_scale` times as large as usual:
    a ring over many ranks has many steps, whatever it brings.

    Raises `ConfigError` where the numbers do not follow that order.
    """

    parameters: int = 1
    gradients: int = 1
    optimizer: int = 1
    bucket_scale: int = 1

    def __post_init__(self) -> None:
        counts = self.parameters, self.gradients, self.optimizer
        if min(*counts, self.bucket_scale) < 1:
            raise ConfigError(f"{self} shards: each number must be 1 or more")
        if self.gradients not in (self.parameters, self.optimizer):
            raise ConfigError(
                f"{self} shards of parameters, gradients and optimizer state: gradients must be "
                f"sharded like parameters ({self.parameters}) or optimizer state ({self.optimizer})"
            )
        if self.gradients % self.parameters or self.optimizer % self.gradients:
            raise ConfigError(
                f"{self} shards of parameters, gradients and optimizer state: each number must "
                "divide the next"
            )

    def __str__(self) -> str:
        larger = f", buckets x {self.bucket_scale}" if self.bucket_scale != 1 else ""
        return f"{self.parameters}, {self.gradients}, {self.optimizer}{larger}"

    @property
    def updates_what_it_keeps(self) -> bool:
        """Whether a rank updates all that it keeps of parameters, and nothing else."""
        return self.optimizer == self.parameters

    @property
    def counts(self) -> tuple[int, int, int]:
        """The three numbers."""
        return self.parameters, self.gradients, self.optimizer

    def within(self, ranks: int) -> StateShards:
        """As many of each as fewer `ranks` can share: those of experts, which dp ranks share alone.

        Of a number of shards, the greatest divisor that divides the ranks too.
        """
        if ranks % self.optimizer == 0:  # and so by the two others, which divide it
            return self
        parameters, gradients, optimizer = (math.gcd(n, ranks) for n in self.counts)
        return replace(self, parameters=parameters, gradients=gradients, optimizer=optimizer)

    def key(self, role: Role, place: int) -> tuple[int, ...]:
        """What ranks of one process group have in common; `place` is a rank's among all."""
        match role:
            case Role.GATHER:
                return (place // self.parameters,)
            case Role.REFRESH:
                return place // self.optimizer, place % self.parameters
            case Role.BLOCK:
                return (place // self.optimizer,)
            case Role.REPLICAS:
                return (place % self.optimizer,)

    def reduction(self, *, last: bool) -> Iterator[Role]:
        """The groups over which gradients are added up, one after the other; after the `last`
        micro-batch, over all ranks.
        """
        if self.gradients > 1:
            yield Role.GATHER if self.gradients == self.parameters else Role.BLOCK
        if last:
            if self.gradients != self.optimizer:
                yield Role.REFRESH
            yield Role.REPLICAS

    def check(self, ranks: int) -> None:
        """Raises `ConfigError` where the shards do not divide over so many `ranks`."""
        if ranks % self.optimizer:
            raise ConfigError(
                f"{self} shards of parameters, gradients and optimizer state: {self.optimizer} "
                f"must divide the {count_of(ranks, 'rank')} that share the state (dp, times cp or "
                "ep)"
            )


UNSHARDED = StateShards()
# "auto", or a stage of ZeRO or three numbers, for all stages or for each.
ShardsGiven = str | Sequence[int] | Sequence[str | Sequence[int]]
AUTO = "auto"
ZERO = {"zero-0": (1, 1, 1), "zero-1": (1, 1, 0), "zero-2": (1, 0, 0), "zero-3": (0, 0, 0)}


def parse_shards(given: ShardsGiven, ranks: int, stages: int) -> tuple[StateShards, ...]:
    """The shards of each stage that a user asks for.

    Three numbers, or a stage of ZeRO over all `ranks`; or a sequence of these, one a stage.
    Raises `ConfigError` for what is none of them, and as `StateShards` and its `check` do.
    """
    count = stages_given(given)
    if count is None:
        return (_parse(given, ranks),) * stages  # type: ignore[arg-type]
    if count != stages:
        raise ConfigError(
            f"state_shards has {count} entries, the pipeline {count_of(stages, 'stage')}; give one "
            "for each, or one for all"
        )
    return tuple(_parse(one, ranks) for one in given)  # type: ignore[arg-type]


def stages_given(given: ShardsGiven | None) -> int | None:
    """Of how many stages a user gives the shards of each; None where one is for all, or open."""
    if given is None or isinstance(given, str) or all(isinstance(count, int) for count in given):
        return None
    return len(given)


def check_shards(given: ShardsGiven | None) -> None:
    """Raises `ConfigError` for what names no shards, whatever the ranks and stages."""
    if given is not None and given != AUTO:
        for one in [given] if stages_given(given) is None else given:
            _shards(one, 1)  # type: ignore[arg-type]


def _parse(given: str | Sequence[int], ranks: int) -> StateShards:
    shards = _shards(given, ranks)
    shards.check(ranks)
    return shards


def _shards(given: str | Sequence[int], ranks: int) -> StateShards:
    if isinstance(given, str):
        if given not in ZERO:
            raise ConfigError(
                f"state_shards {given!r} is not known; choose one of {AUTO}, {', '.join(ZERO)}, "
                "or give the numbers of shards of parameters, gradients and optimizer state"
            )
        given = [count or ranks for count in ZERO[given]]
    if not isinstance(given, Sequence) or len(given) != 3:
        raise ConfigError(
            f"state_shards {given!r} must be three numbers of shards: of parameters, gradients and "
            "optimizer state"
        )
    return StateShards(*given)


def lattice(ranks: int) -> Iterator[StateShards]:
    """Every way to shard the state over so many ranks, the least sharded first."""
    divisors = [d for d in range(1, ranks + 1) if ranks % d == 0]
    for optimizer in divisors:
        for parameters in (d for d in divisors if optimizer % d == 0):
            for gradients in sorted({parameters, optimizer}):
                yield StateShards(parameters, gradients, optimizer)


def coarse_lattice(ranks: int, inside: int) -> Iterator[StateShards]:
    """Shards whose numbers are 1, `inside` (those of a node) or all `ranks`, and no others."""
    counts = {1, ranks} | ({inside} if inside and ranks % inside == 0 else set())
    for one in lattice(ranks):
        if {one.parameters, one.gradients, one.optimizer} <= counts:
            yield one
