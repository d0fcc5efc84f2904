"""A model's pieces on the stages of a strategy, and what runs them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from merakc.costs.device import Place, rank_place
from merakc.costs.measured import NONE, Corrections
from merakc.costs.ranks import rank_devices, reserved_bytes
from merakc.costs.stage import with_messages
from merakc.costs.stages import (
    PieceCost,
    balanced_stages,
    even_stages,
    layers_of,
    parameter_layers,
    piece_cost,
    shared_parameters,
    stage_costs,
    stage_parameters,
)
from merakc.costs.state import (
    MIXED,
    Layer,
    Precision,
    in_buckets,
    state_bytes,
)
from merakc.costs.work.pieces import Piece
from merakc.ir.costs import StageCost
from merakc.ir.state import StateShards
from merakc.ir.strategy import Strategy
from merakc.machines.cluster import Device, Hardware, Sharing
from merakc.schedules.known_orders import rank_of


@dataclass(frozen=True, slots=True)
class Framework:
    """How what trains runs a strategy, as far as the seconds of a step depend on it.

    With `stagewise`, as merakc's runtime has it, the longest stage is as short as it can be, and a
    recomputation starts from what the stage has received; without, blocks are spread evenly and
    each is recomputed from what enters it. `overlap` is the share of its speed at which
    communication of gradients and parameters runs under computing; 0 waits for all of it. With
    `split_messages` each tp rank sends its part of a message alone, and the parts are gathered in
    the node (Narayanan et al. 2021, section 4.1). With `tp_overlap` the collectives of tp run
    beside the products that they belong to. With `whole_batch` backwards wait for all forwards, as
    a loss that couples samples makes them. `precision` are the bytes of a parameter's state.
    """

    precision: Precision = MIXED
    overlap: float = 0.0
    split_messages: bool = False
    tp_overlap: bool = False
    stagewise: bool = False
    whole_batch: bool = False


PLAIN = Framework()


@dataclass(frozen=True)
class Job:
    """A model's pieces on the stages of a strategy, with their seconds.

    `places` and `costs`, those of all pieces there, are each pipeline rank's; `parts` are the
    places of each stage's pieces. `sharing` is what the ranks of a node share, `beside` the share
    of its speed that communication has beside computes. A job that `fetches` has its parameters on
    the host. What the strategy says of the state's shards and of recomputation changes none of
    this.
    """

    pieces: Sequence[Piece]
    strategy: Strategy
    framework: Framework
    places: Sequence[Place]
    costs: Sequence[Sequence[PieceCost]]
    parts: Sequence[Sequence[int]]
    sharing: Sharing | None = None
    beside: float = 1.0
    fetches: bool = False

    @cached_property
    def rank_of(self) -> tuple[int, ...]:
        """The pipeline rank of each stage."""
        return rank_of(self.strategy)

    @property
    def links(self) -> Place:
        """Any rank's place, for the links that all have alike."""
        return self.places[0]

    @cached_property
    def kinds(self) -> list[int]:
        """The first place of each piece: equal ones may be one value many times."""
        first: dict[int, int] = {}
        return [first.setdefault(id(piece), k) for k, piece in enumerate(self.pieces)]

    @cached_property
    def rank_pieces(self) -> list[list[int]]:
        """The places of each pipeline rank's pieces."""
        held: list[list[int]] = [[] for _ in range(self.strategy.pp)]
        for part, rank in zip(self.parts, self.rank_of, strict=True):
            held[rank] += part
        return held

    @cached_property
    def rank_parameters(self) -> list[int]:
        """The trained elements of each pipeline rank."""
        return self._parameters_of(self.rank_pieces)

    @cached_property
    def rank_experts(self) -> list[int]:
        """Those of them that are of experts of its own."""
        return self._parameters_of(self.rank_pieces, of_experts=True)

    @cached_property
    def _held(self) -> list[tuple[int, int]]:
        """Both numbers of each pipeline rank, of which most have the same ones."""
        return [*zip(self.rank_parameters, self.rank_experts, strict=True)]

    def _parameters_of(
        self, parts: Sequence[Sequence[int]], *, of_experts: bool | None = None
    ) -> list[int]:
        """The trained elements of the pieces at these places, if it is said, of experts alone."""
        alike = [tuple([self.kinds[k] for k in part]) for part in parts]
        known = {
            own: stage_parameters([self.pieces[k] for k in own], of_experts=of_experts)
            for own in {*alike}
        }
        return [known[own] for own in alike]

    def shares(
        self, shards: StateShards, elements: int, of_experts: int
    ) -> tuple[tuple[int, StateShards], ...]:
        """So many elements in their shards: of those of experts, which dp ranks share alone, and of
        the others.
        """
        of_dp = shards.within(self.strategy.dp)
        return (elements - of_experts, shards), (of_experts, of_dp)

    def _state_bytes(self, shards: StateShards, elements: int, of_experts: int) -> int:
        precision = self.framework.precision
        shares = self.shares(shards, elements, of_experts)
        return sum(state_bytes(count, own, precision) for count, own in shares)

    def owned(self, shards: StateShards) -> list[int]:
        """The elements that each pipeline rank updates."""
        counts = {
            pair: sum(-(-count // own.optimizer) for count, own in self.shares(shards, *pair))
            for pair in {*self._held}
        }
        return [counts[pair] for pair in self._held]

    @cached_property
    def tied_parameters(self) -> int:
        """The elements that several stages hold."""
        return sum(shared_parameters(self.pieces, self.parts).values())

    @cached_property
    def state_layers(self) -> list[Layer]:
        """What the rank with the most parameters has: each of them, or the pieces as they are."""
        most = self.rank_parameters.index(max(self.rank_parameters))
        places, costs = self.rank_pieces[most], self.costs[most]
        each = parameter_layers if self.framework.stagewise else layers_of
        return each([self.pieces[k] for k in places], [costs[k] for k in places])

    def layers_in_buckets(self, shards: StateShards) -> list[Layer]:
        """The same as they travel."""
        scale, kept_bytes = shards.bucket_scale, self.framework.precision.kept_bytes
        if scale not in self._in_buckets:
            self._in_buckets[scale] = in_buckets(self.state_layers, kept_bytes, scale)
        return self._in_buckets[scale]

    @cached_property
    def _in_buckets(self) -> dict[int, list[Layer]]:
        return {}

    @cached_property
    def ends_s(self) -> dict[Hashable, float]:
        """When orders of work end that were run, by what that depends on."""
        return {}

    @cached_property
    def stage_parameters(self) -> list[int]:
        """The trained elements of each stage."""
        return self._parameters_of(self.parts)

    @cached_property
    def stage_experts(self) -> list[int]:
        """Those of them that are of experts of its own."""
        return self._parameters_of(self.parts, of_experts=True)

    @cached_property
    def _stages(self) -> list[StageCost]:
        return self._priced(stagewise=self.framework.stagewise)

    @cached_property
    def _by_block(self) -> list[StageCost]:
        return self._priced(stagewise=False)

    def _priced(self, *, stagewise: bool) -> list[StageCost]:
        """Stages of the same pieces, behind the same one, are one value many times. Where the cores
        that compute carry messages, each costs them its latency at both of its ends, as in a plan
        in full (`lowering.predict.cost_table`).
        """
        known: dict[tuple[int, ...], StageCost] = {}
        fabric, found = self.links.fabric, []
        message_s = (1.0 - self.beside) * fabric.local_latency_s if fabric.by_cores else 0.0
        for stage, (part, rank) in enumerate(zip(self.parts, self.rank_of, strict=True)):
            before = self.kinds[part[0] - 1] if part[0] else -1
            others = self.rank_of[max(stage - 1, 0) : stage + 2]
            ends = sum(other != rank for other in others)
            key = id(self.places[rank]), before, ends, *[self.kinds[k] for k in part]
            if key not in known:
                (cost,) = stage_costs(
                    self.pieces, self.costs[rank], [part], self.places[rank],
                    precision=self.framework.precision, stagewise=stagewise,
                    gradients=self.framework.stagewise,
                )  # fmt: skip
                known[key] = with_messages(cost, ends * message_s, ends * message_s)
            found.append(known[key])
        return found

    def stages(self, shards: StateShards, *, by_block: bool = False) -> list[StageCost]:
        """The costs of the stages, of which only the bytes of their state depend on the shards;
        `by_block` of such as make blocks again from what enters each. Equal ones are one value.
        """
        costs = self._by_block if by_block else self._stages
        pairs = zip(self.stage_parameters, self.stage_experts, strict=True)
        counts = {id(c): pair for c, pair in zip(costs, pairs, strict=True)}
        made = {
            key: replace(cost, static_bytes=self._state_bytes(shards, *counts[key]))
            for key, cost in {id(c): c for c in costs}.items()
        }
        return [made[id(cost)] for cost in costs]

    def state_bytes(self, shards: StateShards) -> list[int]:
        """What each pipeline rank holds between two steps."""
        sizes = {pair: self._state_bytes(shards, *pair) for pair in {*self._held}}
        return [sizes[pair] for pair in self._held]

    @property
    def memory_bytes(self) -> list[int]:
        """What each pipeline rank has for its tensors."""
        devices, mesh = [place.device for place in self.places], self.strategy.mesh
        return [device.memory_bytes - reserved_bytes(device, mesh) for device in devices]


def make_job(
    pieces: Sequence[Piece],
    strategy: Strategy,
    hardware: Hardware,
    framework: Framework = PLAIN,
    corrections: Corrections = NONE,
    labels: Callable[[Piece], Sequence[str]] = lambda piece: (),
) -> Job:
    """Times pieces on `strategy.world_size` neighbouring devices and spreads them over stages.

    `pieces` are of one tp rank and micro-batch; equal blocks may be one value many times.
    """
    devices = rank_devices(hardware, strategy.mesh)
    places = {
        device: rank_place(
            hardware,
            strategy.world_size,
            strategy.tp,
            cp=strategy.cp,
            overlap=framework.tp_overlap,
            device=device,
        )
        for device in dict.fromkeys(devices)
    }
    costs: dict[Device, list[PieceCost]] = {}
    unique = {id(piece): piece for piece in pieces}
    for device, place in places.items():
        known = {k: piece_cost(p, place, corrections, labels(p)) for k, p in unique.items()}
        costs[device] = [known[id(piece)] for piece in pieces]
    on_ranks = [costs[device] for device in devices]
    if framework.stagewise:
        parts = balanced_stages([on_ranks[rank] for rank in rank_of(strategy)])
    else:
        parts = even_stages(pieces, (), strategy.stage_count)
    of_ranks = [places[device] for device in devices]
    return Job(
        pieces,
        strategy,
        framework,
        of_ranks,
        costs=on_ranks,
        parts=parts,
        sharing=hardware.sharing,
        beside=hardware.beside(strategy.world_size),
    )
