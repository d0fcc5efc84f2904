"""The Plan: every decision about a training step, keyed by the user's own names."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from typing import Any

from merakc.ir.batches import WHOLE_BATCH, Couplings, Rows
from merakc.ir.layout import Axis, Layout, parse_layout
from merakc.ir.offload import OnHost
from merakc.ir.state import StateShards
from merakc.ir.strategy import Strategy
from merakc.machines.cluster import Cluster


@dataclass(frozen=True, slots=True)
class GraphId:
    """The hash of a graph, and of each module's part of it, in program order."""

    hash: str
    modules: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class StageRun:
    """A run of consecutive nodes of the graph that one stage executes."""

    stage: int
    first_node: str
    last_node: str
    first_module: str
    last_module: str


@dataclass(frozen=True, slots=True)
class OpaqueModule:
    """A module that runs as it is, whole on one stage and on every tp rank.

    `source` is the line of it that could not be recorded and `reason` why; `flops_share` is its
    part of the forward's arithmetic, as a trial run counted it.
    """

    name: str
    source: str
    reason: str
    flops_share: float


@dataclass(frozen=True, slots=True)
class CoupledLoss:
    """Why micro-batches wait for the whole batch: its loss couples the samples, behind a stage.

    `source` is the line that does and `why` how; it reads `waist_bytes` of the whole batch.
    """

    stage: int
    source: str
    why: str
    waist_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(Strategy):
    """A strategy, and what follows from it for one model: decisions alone.

    `splits` holds the layout (`merakc.ir.layout`) of each parameter and buffer that is split over
    tp, or ranks of experts; `parameters` the stages that hold each parameter. `whole_ops` names the
    ops, with their source lines, that each tp rank computes whole because there is no rule to split
    them, `head` tells of a loss that couples samples: with those of the whole batch, or by
    `couplings` of their micro-batch. `conventions` names what is of each micro-batch by convention,
    with its lines. `batch_dims` says where the samples of the batch's tensors stand, by name or
    pattern, where sizes do not.

    `placement` holds the pipeline rank of each stage; without it, each rank has one. `keep_bytes`
    is what a micro-batch may keep on each stage from its forward to its backward where `recompute`
    is "solved"; at -1 it keeps all. `kept_blocks` says what the blocks of each stage keep
    (`merakc.ir.recompute`) where its backward makes the rest again; without it, all layers do as
    `recompute` says. `sub_batches` is the number of parts in which each stage runs a micro-batch,
    one's communication under the others' arithmetic; without it, collectives block. `row_chunks`
    holds the numbers of chunks of rows, by the names of their weights, in which products beside
    collectives are computed where a micro-batch runs whole; `fused_products` names the weights
    whose products are one op with the collective beside them instead. The figures of `machines`
    decide the order of the nodes of such stages.

    `host_states` names the parameters that are updated on the host: what the optimizer keeps of
    them is there, with the copy that it updates, of which the device has another to compute with;
    of `host_parameters` that is there too, and comes to the device as it is read.
    `host_activations` is, by stage, the share of what a micro-batch keeps for its backward that
    waits there (`merakc.passes.offload`), moved where the figures of `machines` say.
    """

    model: str
    graph: GraphId
    stages: tuple[StageRun, ...]
    parameters: dict[str, tuple[int, ...]]
    splits: dict[str, str]
    whole_ops: tuple[str, ...] = ()
    opaque_modules: tuple[OpaqueModule, ...] = ()
    head: CoupledLoss | None = None
    couplings: Couplings = WHOLE_BATCH
    conventions: tuple[str, ...] = ()
    batch_dims: dict[str, Rows | None] = dataclasses.field(default_factory=dict)
    placement: tuple[int, ...] = ()
    keep_bytes: tuple[int, ...] = ()
    kept_blocks: tuple[str, ...] = ()
    sub_batches: tuple[int, ...] = ()
    row_chunks: dict[str, int] = dataclasses.field(default_factory=dict)
    fused_products: tuple[str, ...] = ()
    machines: Cluster | None = None
    host_states: tuple[str, ...] = ()
    host_parameters: tuple[str, ...] = ()
    host_activations: tuple[float, ...] = ()

    @property
    def has_buckets(self) -> bool:
        """Whether parameters stand in buckets (`merakc.analysis.buckets`): where several ranks may
        share their state, or what the optimizer updates is a copy of its own.
        """
        return self.state_ranks > 1 or self.precision is not None or bool(self.on_host)

    @property
    def has_collectives(self) -> bool:
        """Whether buckets are gathered or reduced: over dp, or from and to the host."""
        return self.state_ranks > 1 or bool(self.on_host)

    @property
    def updates_what_it_keeps(self) -> bool:
        """Whether each rank updates all that it keeps of parameters, which may be on the host."""
        return all(shards.updates_what_it_keeps for shards in self.state_shards)

    @property
    def on_host(self) -> OnHost:
        """The parameters of which something lives on the host."""
        return OnHost(self.host_states, self.host_parameters, one=self.micro_batches == 1)

    @property
    def tp_splits(self) -> dict[str, Layout]:
        """What tp splits, as if there were no ranks of experts."""
        return self._splits(None if not self.expert_parallel else Axis(self.tp, 1))

    @property
    def expert_splits(self) -> dict[str, Layout]:
        """What ranks of experts have parts of, as if there were no tp."""
        if not self.expert_parallel:
            return {}
        return self._splits(None if self.tp == 1 else Axis(self.cp, self.tp))

    @property
    def of_experts(self) -> frozenset[str]:
        """The parameters of which ranks of experts have parts of their own."""
        return frozenset(self.expert_splits)

    def _splits(self, axis: Axis | None) -> dict[str, Layout]:
        """The layouts over one axis; without one, as the plan has them."""
        every = {name: parse_layout(text) for name, text in self.splits.items()}
        parts = {name: lay if axis is None else lay.part(axis) for name, lay in every.items()}
        return {name: layout for name, layout in parts.items() if layout.is_split}

    @property
    def rank_of(self) -> tuple[int, ...]:
        """The pipeline rank of each stage."""
        return self.placement or tuple(range(self.pp))

    def other_shards(self, stage: int) -> dict[str, StateShards]:
        """How the parameters of a stage are sharded that are not as its others: of those that it
        shares with one before it as there, of experts over fewer ranks.
        """
        experts = self.of_experts
        return {
            name: self.shards(stages[0]).within(self.dp if name in experts else self.state_ranks)
            for name, stages in self.parameters.items()
            if stage in stages and (stages[0] != stage or name in experts)
        }

    @property
    def hash(self) -> str:
        """SHA-256 of all that it holds."""
        return digest(dataclasses.asdict(self))


def digest(body: dict[str, Any]) -> str:
    """SHA-256 of values as JSON."""
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
