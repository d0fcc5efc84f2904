"""The Program: what one rank does in one step, as a list of actions.

The simulator and the runtime execute the same lists. Notation of an action, after
`torch.distributed.pipelining`: `2F0` is the forward of stage 2 on micro-batch 0, `2B0` its
backward, `2I0`/`2W0` its input- and weight-gradient halves, `2R0` its forward once more for what
the backward reads, `2head` what couples the samples of all micro-batches, `send 2F0 add_7 -> 3` and
`recv 1F0 add_3 <- 1` messages with a peer rank. A message of a rank to itself is handed over in
memory, from one of its stages to another.

Collectives over dp run beside the computes that start them. `gather 2 [refresh 2:0]` starts them
with the step, `2F0 [wait 2:0, gather 2:1 @ linear]` waits for a bucket before its first reader and
starts the next one's gather, `2B3 [reduce 2:1 @ mm_4]` reduces one as soon as `mm_4` has made its
last gradient, and `reduce 2` waits for what is left.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Literal

from merakc.ir.graph import Graph, Input, InputKind, OutputKind
from merakc.ir.layout import Axis, Layout

# The axis whose neighbours are closer, after those of tp.
Inner = Literal["pp", "dp"]
# Receives are posted ahead of need: those of the next compute and of the one after.
LOOKAHEAD = 2
_NUMBER = re.compile(r"\d+")


class ActionKind(StrEnum):
    """What an action does."""

    FORWARD = "F"
    BACKWARD = "B"  # input and weight gradients together
    INPUT_GRAD = "I"
    WEIGHT_GRAD = "W"
    RECOMPUTE = "R"  # the forward again, for what was not kept
    HEAD = "head"  # what couples the samples of the batch, once for all micro-batches
    SEND = "send"
    RECV = "recv"
    GATHER = "gather"  # of parameters over dp, started with the step
    REDUCE = "reduce"  # gradients over dp and over the holders of tied parameters

    @property
    def is_message(self) -> bool:
        """Whether it is an end of a message."""
        return self in (ActionKind.SEND, ActionKind.RECV)

    @property
    def is_compute(self) -> bool:
        """Whether it runs a graph on a micro-batch."""
        return self in COMPUTES

    @property
    def sends_gradients(self) -> bool:
        """Whether it ends with the gradients that other stages wait for."""
        return self in (ActionKind.BACKWARD, ActionKind.INPUT_GRAD)


COMPUTES = (
    ActionKind.FORWARD,
    ActionKind.BACKWARD,
    ActionKind.INPUT_GRAD,
    ActionKind.WEIGHT_GRAD,
    ActionKind.RECOMPUTE,
)


@dataclass(frozen=True, slots=True)
class Degrees:
    """How many ranks each axis has, and which axis lies inside: the one place that lists them."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    inner: Inner = "pp"
    cp: int = 1

    @property
    def lanes(self) -> int:
        """The ranks that share a micro-batch on each stage: those of tp, for each of cp."""
        return self.tp * self.cp

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.dp * self.lanes * self.pp


@dataclass(frozen=True, slots=True)
class Mesh(Degrees):
    """The ranks as a grid. tp varies fastest, then cp, then the `inner` of the two other axes.

    tp and cp together are a micro-batch's lanes: the lane of a rank is its tp coordinate, and `tp`
    times its cp coordinate. Ranks of cp share the state of a stage as dp ranks do. With `experts`
    they have parts of the weights of experts instead, whose state dp ranks share alone: in layouts
    every lane then counts as a rank that may have a part of its own (`merakc.ir.layout`).
    """

    experts: bool = False

    def rank(self, dp: int, pp: int, lane: int) -> int:
        """The global rank at these coordinates."""
        return dp * self.dp_stride + pp * self.pp_stride + lane

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """(dp, pp, lane) coordinates of a global rank."""
        dp, pp = rank // self.dp_stride % self.dp, rank // self.pp_stride % self.pp
        return dp, pp, rank % self.lanes

    @property
    def weight_ranks(self) -> int:
        """Over how many lanes weights are split, where they are."""
        return self.lanes if self.experts else self.tp

    def is_of_experts(self, layout: Layout) -> bool:
        """Whether a weight is split over ranks of experts, which then have parts of their own."""
        return self.experts and layout.is_apart(Axis(self.cp, self.tp))

    def sharers(self, *, of_experts: bool) -> Mesh:
        """The grid as a weight sees it whose state is shared: of experts, every lane is one of
        tp's; of others, those of cp are as without experts.
        """
        if self.experts and of_experts:
            return replace(self, tp=self.lanes, cp=1, experts=False)
        return replace(self, experts=False) if self.experts else self

    @property
    def state_ranks(self) -> int:
        """Over how many ranks parameters, gradients and optimizer state may be sharded: of experts,
        fewer (`sharers`).
        """
        return self.dp * self.cp

    def state_rank(self, rank: int) -> int:
        """The place of a global rank among those that share its state, in the order of ranks."""
        dp, _, lane = self.coordinates(rank)
        return dp * self.cp + lane // self.tp

    def sharing(self, rank: int) -> tuple[int, ...]:
        """The global ranks that share the state of one of them, in the order of their places."""
        _, pp, own = self.coordinates(rank)
        lanes = range(own % self.tp, self.lanes, self.tp)
        return tuple(self.rank(dp, pp, lane) for dp in range(self.dp) for lane in lanes)

    @property
    def state_stride(self) -> int:
        """How far apart neighbours of them are, on average."""
        if self.cp == 1:
            return self.dp_stride
        return self.dp_stride // self.cp if self.dp > 1 else self.tp

    @property
    def dp_stride(self) -> int:
        """How far apart neighbours of the dp axis are."""
        return self.lanes * (self.pp if self.inner == "pp" else 1)

    @property
    def pp_stride(self) -> int:
        """How far apart neighbours of the pp axis are."""
        return self.lanes * (self.dp if self.inner == "dp" else 1)


@dataclass(frozen=True, slots=True)
class Transfer:
    """A value that one stage computes and another reads, per micro-batch and tp rank."""

    value: str
    source_stage: int
    target_stage: int
    size_bytes: int
    grad: bool  # whether its gradient travels back


class CollectiveKind(StrEnum):
    """What happens to a bucket of parameters (`merakc.analysis.buckets`) in a compute."""

    REFRESH = "refresh"  # starts to bring what the optimizers wrote to the shards of parameters
    GATHER = "gather"  # starts to gather its shards of parameters
    WAIT = "wait"  # its parameters are read from here on
    SCATTER = "scatter"  # starts to scatter a micro-batch's gradients
    REDUCE = "reduce"  # starts the reduction of its gradients after the last micro-batch


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective over dp that an action starts or, as `WAIT`, waits for.

    It stands right before `node` of the action's graph or, of gradients, right behind it, with
    `share` of the graph's work before it.
    """

    kind: CollectiveKind
    bucket: str
    node: str = ""
    share: float = 0.0

    def __str__(self) -> str:
        where = f" @ {self.node}" if self.node else ""
        return f"{self.kind} {self.bucket}{where}"


@dataclass(frozen=True, slots=True)
class Action:
    """One entry of a rank's list.

    `stage` is the acting rank's. `collectives` run over dp, in their order. The other fields are
    those of a message: `peer` and `peer_stage` are the rank and the stage at its other end.
    """

    kind: ActionKind
    stage: int
    micro_batch: int = 0
    value: str = ""
    peer: int = -1
    size_bytes: int = 0
    is_grad: bool = False  # the message is the gradient of `value`
    peer_stage: int = -1
    collectives: tuple[Collective, ...] = ()

    @property
    def message(self) -> tuple[str, bool, int, int, int]:
        """What a send and its receive must agree on, beside the two ranks: value, whether it is a
        gradient, micro-batch, sending stage, receiving stage.
        """
        ends = (self.stage, self.peer_stage)
        source, target = ends if self.kind is ActionKind.SEND else ends[::-1]
        return self.value, self.is_grad, self.micro_batch, source, target

    def __str__(self) -> str:
        if self.kind in (ActionKind.GATHER, ActionKind.REDUCE):
            return f"{self.kind} {self.stage}"
        if self.kind is ActionKind.HEAD:
            return f"{self.stage}{self.kind}"
        if self.kind.is_message:
            arrow = "->" if self.kind is ActionKind.SEND else "<-"
            phase = "B" if self.is_grad else "F"
            where = f"{self.stage}{phase}{self.micro_batch}"
            return f"{self.kind} {where} {self.value} {arrow} {self.peer}"
        return f"{self.stage}{self.kind}{self.micro_batch}"

    @property
    def text(self) -> str:
        """The action with its collectives."""
        inside = ", ".join(map(str, self.collectives))
        return f"{self} [{inside}]" if inside else str(self)


@dataclass(frozen=True, slots=True)
class StageGraphs:
    """The executable graphs of one stage.

    `forward` maps the stage's inputs to its outputs, then the saved values. `backward` maps some
    of the forward's inputs, the saved values (inputs of kind `SAVED`, whose target is the name of
    the forward's output) and the tangents (whose target is the differentiated output) to
    gradients, named after the forward's inputs. It is None where nothing requires a gradient.

    The other pieces are there where a schedule wants them. `checkpoint` is the forward that saves
    less, `recompute` makes the rest of what `forward` saves from the stage's inputs and from what
    `checkpoint` has saved. `input_grad` and `weight_grad` are the halves of `backward`. Whatever
    passes between pieces is an output of kind `SAVED` of the one and the target of an input of
    that kind of the other.
    """

    forward: Graph
    backward: Graph | None
    checkpoint: Graph | None = None
    recompute: Graph | None = None
    input_grad: Graph | None = None
    weight_grad: Graph | None = None

    @property
    def graphs(self) -> tuple[Graph, ...]:
        """The pieces that are there."""
        every = (getattr(self, f.name) for f in fields(self))
        return tuple(graph for graph in every if graph is not None)

    def verify(self) -> None:
        """Asserts that every piece is well-formed, and is handed what it takes from others."""
        saved: set[str] = set()
        for graph in self.graphs:
            graph.verify()
            saved.update(o.name for o in graph.outputs if o.kind is OutputKind.SAVED)
        for graph in self.graphs:
            for item in graph.inputs:
                missing = item.kind is InputKind.SAVED and item.target not in saved
                assert not missing, f"{item.name} reads {item.target}, which no piece saves"

    def piece(self, kind: ActionKind, *, again: bool = False) -> Graph | None:
        """The graph of a kind of compute; `again` says that a recomputation follows a forward."""
        match kind:
            case ActionKind.FORWARD:
                return self.checkpoint if again else self.forward
            case ActionKind.BACKWARD:
                return self.backward
            case ActionKind.INPUT_GRAD:
                return self.input_grad
            case ActionKind.WEIGHT_GRAD:
                return self.weight_grad
            case ActionKind.RECOMPUTE:
                return self.recompute
            case _:
                raise AssertionError(f"{kind} runs no graph")

    def pieces(self, order: Sequence[ActionKind]) -> tuple[Graph | None, ...]:
        """The graphs that a micro-batch runs for these computes, from its forward on."""
        again = ActionKind.RECOMPUTE in order
        return tuple(self.piece(kind, again=again) for kind in order)

    @property
    def written(self) -> frozenset[str]:
        """The names of the buffers that the forward writes."""
        outputs = self.forward.outputs
        return frozenset(o.name for o in outputs if o.kind is OutputKind.BUFFER)

    @property
    def parameters(self) -> frozenset[str]:
        """The names of the inputs that are parameters."""
        inputs = self.forward.inputs
        return frozenset(i.name for i in inputs if i.kind is InputKind.PARAMETER)

    def rewrites(self, item: Input) -> bool:
        """Whether an input of a piece is a buffer that the forward writes."""
        return item.kind is InputKind.BUFFER and item.target in self.written

    def taken(self, piece: Graph) -> frozenset[str]:
        """The keys of what a piece after the forward takes from its micro-batch, and not from the
        batch or the state; of a buffer that the forward writes it takes the value from before.
        """
        held = (InputKind.SAVED, InputKind.ACTIVATION, InputKind.TANGENT)
        return frozenset(i.key for i in piece.inputs if i.kind in held or self.rewrites(i))


@dataclass(frozen=True, slots=True)
class Program:
    """The actions of one rank, in order."""

    rank: int
    actions: tuple[Action, ...]

    def verify(self) -> None:
        """Asserts that no action stands twice, and no gradient is computed before the forward."""
        seen: set[Action] = set()
        for action in self.actions:
            plain = replace(action, collectives=())
            assert plain not in seen, f"rank {self.rank}: {action} twice"
            seen.add(plain)
            if action.kind.sends_gradients:
                forward = Action(ActionKind.FORWARD, action.stage, action.micro_batch)
                assert forward in seen, f"rank {self.rank}: {action} before its forward"

    def __str__(self) -> str:
        return f"rank {self.rank}: " + "; ".join(a.text for a in self.actions)


@dataclass(frozen=True, slots=True)
class Event:
    """An action with its times since the start of the step, simulated or measured."""

    rank: int
    label: str
    kind: ActionKind
    start_s: float
    end_s: float

    @property
    def stage(self) -> int:
        """The first number of its text."""
        found = _NUMBER.search(self.label)
        assert found is not None, self.label
        return int(found[0])


@dataclass(frozen=True, slots=True)
class CollectiveEvent:
    """A collective of a compute's graph, with its times since the start of the step.

    It was issued from `start_s` to `issued_s`, and had ended at `end_s`. The rank stood still for
    it from `wait_start_s` to `wait_end_s`: from then on where the collective blocks, and no time
    where it had ended before it was waited for.
    """

    rank: int
    op: str
    axis: str
    size_bytes: int
    start_s: float
    issued_s: float
    end_s: float
    wait_start_s: float
    wait_end_s: float

    @property
    def hidden_s(self) -> float:
        """Its seconds while the rank did something else."""
        return max(0.0, min(self.end_s, self.wait_start_s) - self.issued_s)
