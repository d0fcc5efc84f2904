"""Executes one rank's Program on torch.distributed.

Receives are posted a few compute actions ahead, sends are asynchronous, gradients are added up in
the parameters' own dtype, by the calls that make them where these can, and reduced once, at the end
of the step. Sums have one order whatever the schedule: the loss by micro-batch, a gradient by the
order of its stage's backwards and then by stage, the gradients of a value that several stages read
by stage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch

from merakc.ir.graph import Input, InputKind
from merakc.ir.program import Action, ActionKind, CollectiveEvent, Event, Program, StageGraphs
from merakc.kernels.collectives import watched
from merakc.runtime.arena.places import Anywhere
from merakc.runtime.codegen import compile_graph
from merakc.runtime.fused import Fuser
from merakc.runtime.groups import Channels
from merakc.runtime.head import HeadRunner
from merakc.runtime.health.job import TIMEOUT_S, at_work
from merakc.runtime.messages import Messages
from merakc.runtime.part import Handles
from merakc.runtime.pieces import Compiler, Piece, Stage, Work
from merakc.runtime.sharded_state import ShardedState
from merakc.runtime.watch import Clock, Moment, Watch

Tensors = dict[str, torch.Tensor]
Value = tuple[int, str, bool]  # stage, name, whether its gradient is meant


@dataclass(slots=True)
class StepResult:
    """What one step leaves on this rank.

    `loss` is the sum over this rank's micro-batches, or that of the whole batch on dp rank 0, None
    on ranks without the loss. `gradients` are by the parameter's name. `results` are the other
    outputs of each micro-batch, `whole` those of the whole batch, by name. `written` has what each
    micro-batch gives for the buffers that are written once. `collectives` are those of the
    computes' graphs, where they were to be recorded.
    """

    loss: torch.Tensor | None
    gradients: Tensors
    results: list[Tensors]
    events: tuple[Event, ...]
    collectives: tuple[CollectiveEvent, ...] = ()
    whole: Tensors = field(default_factory=dict)
    written: dict[str, list[torch.Tensor]] = field(default_factory=dict)


@dataclass(slots=True)
class _Live:
    """What is alive of one micro-batch on one stage.

    `values` are received activations, saved values and summed tangents by the names under which
    pieces read them; `tangents` gradients as they came, by value and the stage that they are from;
    `outgoing` what is still to be sent, with the number of sends.
    """

    inputs: Tensors  # batch tensors and scalars, by input name
    values: Tensors = field(default_factory=dict)
    tangents: dict[str, dict[int, torch.Tensor]] = field(default_factory=dict)
    outgoing: dict[tuple[str, bool], tuple[torch.Tensor, int]] = field(default_factory=dict)


class Executor:
    """Runs a Program again and again, on new micro-batches.

    `chunks` are those of the rank's stages. `state` holds the parameters and buffers by the names
    of the model; buffers are written in place. `reduce` is called once a step with the
    gradients that are whole; `sharded` holds the parameters that are not. `channels` are what
    messages are sent over. A message that does not come within `timeout_s` raises `StuckError`.
    Gradients are those of the loss times `loss_scale`. `compiler` compiles the graphs, with a
    `fuser` fused ones. `head` runs what couples the samples of the whole batch, where that is on
    this rank; buffers that are `late` are left to be written behind all micro-batches.
    """

    loss_scale = 1.0

    def __init__(
        self,
        program: Program,
        chunks: Mapping[int, StageGraphs],
        state: Tensors,
        device: torch.device,
        *,
        reduce: Callable[[Tensors], None] | None = None,
        channels: Channels | None = None,
        timeout_s: float = TIMEOUT_S,
        sharded: ShardedState | None = None,
        fuser: Fuser | None = None,
        head: HeadRunner | None = None,
        late: Collection[str] = (),
        compiler: Compiler = compile_graph,
    ) -> None:
        self.sharded, self.head, self.late = sharded, head, frozenset(late)
        self.places = Anywhere()  # where memory comes from, and which action runs
        self.program, self.state, self.device = program, state, device
        self.reduce, self.channels, self.timeout_s = reduce, channels or {}, timeout_s
        self.stages = {
            s: Stage(s, chunk, program, device, sharded, fuser=fuser, compiler=compiler)
            for s, chunk in chunks.items()
        }
        self.gradients = frozenset().union(*(s.gradients for s in self.stages.values()))
        self.specs = {
            (number, name): spec
            for number, stage in self.stages.items()
            for name, spec in stage.specs.items()
        }
        sends = (a for a in program.actions if a.kind is ActionKind.SEND)
        per_batch = {(a.stage, a.value, a.is_grad, a.peer_stage) for a in sends}
        self.readers: Counter[Value] = Counter(k[:3] for k in per_batch)
        last = [k for k, a in enumerate(program.actions) if a.kind is ActionKind.REDUCE]
        self.reduce_at = max(last, default=-1)

    def run(
        self,
        micro_batches: Sequence[Tensors],
        known: Tensors | None = None,
        *,
        record: bool = False,
    ) -> StepResult:
        """One step. `micro_batches[j]` maps input names to the tensors of micro-batch j; `known` is
        what the head reads beside the waist, of the whole batch.

        With `record`, the collectives of the graphs are timed too, and on a GPU all times are those
        of its streams. Raises `StuckError` where a message does not come.
        """
        step = self.step(micro_batches, known, record=record)
        at_work(self.doing)
        try:
            with torch.no_grad(), step.watching(), self.places.step():
                step.run()
        finally:
            step.close()
            if self.sharded is not None:
                self.sharded.end()
        at_work(None)
        return StepResult(
            step.loss(), step.gradients, step.results, events=step.events(),
            collectives=step.collectives(), whole=step.whole, written=step.written,
        )  # fmt: skip

    def doing(self) -> str:
        """The action that runs, in words."""
        actions, at = self.program.actions, self.places.at
        return f"action {at + 1} of {len(actions)}, '{actions[at]}'" if actions else ""

    def step(
        self, micro_batches: Sequence[Tensors], known: Tensors | None, *, record: bool
    ) -> Step:
        """One step, to be run."""
        return Step(self, micro_batches, known, record=record)


class Step:
    """The state of one step; of the executor's Program, with its messages, where no others are
    given.
    """

    def __init__(
        self,
        executor: Executor,
        micro_batches: Sequence[Tensors],
        known: Tensors | None = None,
        *,
        record: bool,
        program: Program | None = None,
        messages: Messages | None = None,
    ) -> None:
        self.of = executor
        self.clock = Clock(executor.device if record else None)
        self.watch = Watch(self.clock) if record else None
        self.program = program or executor.program
        self.live: dict[Work, _Live] = {
            (s, j): _Live(dict(inputs))
            for s in executor.stages
            for j, inputs in enumerate(micro_batches)
        }
        self.messages = messages or Messages(
            executor.program, executor.specs, executor.device, executor.channels, executor.timeout_s
        )  # fmt: skip
        self.known, self.handles = known or {}, Handles(executor.state)
        self.waist: dict[str, dict[int, torch.Tensor]] = {}  # by micro-batch
        self.whole: Tensors = {}
        self.written: dict[str, list[torch.Tensor]] = {}
        self.handed: dict[object, torch.Tensor] = {}  # between two stages of this rank
        self.losses: dict[int, torch.Tensor] = {}
        self.gradients: Tensors = {}
        self.results: list[Tensors] = [{} for _ in micro_batches]
        self.done: list[tuple[Action, Moment, Moment]] = []  # with their times

    def watching(self) -> AbstractContextManager[None]:
        """While it is entered, collectives are timed, if they are to be."""
        return nullcontext() if self.watch is None else watched(self.watch)

    def events(self) -> tuple[Event, ...]:
        """The actions with their times."""
        rank, seconds = self.program.rank, self.clock.seconds
        return tuple(
            Event(rank, str(action), action.kind, seconds(start), seconds(end))
            for action, start, end in self.done
        )

    def collectives(self) -> tuple[CollectiveEvent, ...]:
        """The collectives that were timed."""
        return () if self.watch is None else self.watch.events(self.program.rank)

    def run(self) -> None:
        """All actions in order."""
        for k, action in enumerate(self.program.actions):
            self.of.places.begin(k)
            start = self.clock.now()
            self.messages.post_receives(k)
            if action.kind is ActionKind.SEND:
                self.send(k, action)
            elif action.kind is ActionKind.RECV:
                self.receive(k, action)
            elif action.kind is ActionKind.GATHER:
                if self.of.sharded is not None:
                    self.of.sharded.follow(action.collectives)
            elif action.kind is ActionKind.HEAD:
                self.couple(action.stage)
            elif action.kind is not ActionKind.REDUCE:
                self.compute(action)
            elif k == self.of.reduce_at:
                self.reduce()
            if action.kind is not ActionKind.SEND:
                self.done.append((action, start, self.clock.now()))
        if self.of.reduce_at < 0:
            self._merge()
        self.messages.finish()

    def close(self) -> None:
        """Sends nothing more, and lets go of the stages' sums; after a failure too."""
        self.messages.close()
        for stage in self.of.stages.values():
            stage.sums.clear()

    def loss(self) -> torch.Tensor | None:
        """The sum over the micro-batches, in their order."""
        values = [self.losses[j] for j in sorted(self.losses)]
        return torch.stack(values).sum(0) if values else None

    def compute(self, action: Action) -> None:
        """Runs a piece of a chunk on a micro-batch."""
        stage, work = self.of.stages[action.stage], (action.stage, action.micro_batch)
        live, piece = self.live[work], stage.piece(action.kind, action.micro_batch)
        if piece is None:
            live.values.clear()
            live.tangents.clear()
            return
        if action.kind is ActionKind.FORWARD:
            for name in stage.rewritten:
                live.values[name] = self._input(stage, live, name).clone()
        elif action.kind.sends_gradients:
            self._sum_tangents(live)
        if self.of.sharded is not None:
            self.of.sharded.last = action == stage.last_gradients
            self.of.sharded.follow(action.collectives)
        outs, routes = piece.run(self._given(stage, live, piece)), piece.routes
        for k in routes.losses:
            self.losses[action.micro_batch] = outs[k].clone()
        for k, name in routes.results:
            self.results[action.micro_batch][name] = outs[k]
        for k, name in routes.buffers:
            if name in self.of.late:
                self.written.setdefault(name, []).append(outs[k])
            else:
                self.of.state[name].copy_(outs[k])
        for k, name in routes.saved:
            live.values[name] = outs[k]
        for k, name in routes.waist:
            self.waist.setdefault(name, {})[action.micro_batch] = outs[k]
        for k, name, is_grad in routes.sent:
            readers = self.of.readers[action.stage, name, is_grad]
            if readers:
                live.outgoing[name, is_grad] = outs[k], readers
        gradients = [(target, outs[k], owned) for k, target, owned in routes.gradients]
        del outs
        self._accumulate(stage, gradients)

    def couple(self, stage: int) -> None:
        """Runs what couples the samples of the batch, on what all parts have made for it."""
        head = self.of.head
        assert head is not None, f"nothing couples samples on stage {stage}"
        waist, self.waist = self.waist, {}
        parts = {name: [of[j] for j in sorted(of)] for name, of in waist.items()}
        waist.clear()
        found = head.run(head.whole(parts), self.known, self.of.loss_scale)
        if found.loss is not None and head.layout.dp_rank == 0:  # it counts once
            self.losses[0] = found.loss
        self.whole = found.results
        for j, gradients in enumerate(found.gradients):
            self.live[stage, j].values |= gradients

    def _given(self, stage: Stage, live: _Live, piece: Piece) -> list[torch.Tensor]:
        """The inputs of a piece; what no later one reads is held by nobody else from here on."""
        handles, values = self.handles, live.values
        given = [
            handles[name]
            if name is not None
            else values[key]
            if key in values
            else self._brought(stage, live, item)
            for item, key, name in zip(piece.given, piece.keys, piece.held, strict=True)
        ]
        live.values = {name: v for name, v in values.items() if name in piece.leaves}
        return given

    def _brought(self, stage: Stage, live: _Live, item: Input) -> torch.Tensor:
        if item.kind is InputKind.TANGENT:
            return self._tangent(stage, item)
        return self._input(stage, live, item.key)

    def _input(self, stage: Stage, live: _Live, name: str) -> torch.Tensor:
        for values in (live.values, live.inputs, stage.constants):
            if name in values:
                return values[name]
        return self.handles[stage.targets[name] or name]

    def _tangent(self, stage: Stage, item: Input) -> torch.Tensor:
        # The loss counts once; what is handed on and no one differentiates counts nothing.
        handed_on = item.target in stage.specs or item.target in stage.waist
        fill = 0.0 if handed_on else self.of.loss_scale
        return torch.full(item.spec.shape, fill, dtype=item.spec.dtype, device=self.of.device)

    def _sum_tangents(self, live: _Live) -> None:
        for name, parts in live.tangents.items():
            first, *others = (parts[s] for s in sorted(parts))
            for other in others:
                first = first + other
            live.values[name] = first
        live.tangents.clear()

    def _accumulate(
        self, stage: Stage, gradients: Sequence[tuple[str, torch.Tensor, bool]]
    ) -> None:
        """Adds a micro-batch's gradients to those of its stage.

        The first ones are kept as they are where nothing else lives in their memory.
        """
        sums = stage.sums
        later = [(sums[target], value) for target, value, _ in gradients if target in sums]
        if later:
            torch._foreach_add_([own for own, _ in later], [value for _, value in later])
        for target, value, owned in gradients:
            if target not in sums:
                sums[target] = (
                    value if owned else value.clone(memory_format=torch.contiguous_format)
                )

    def send(self, position: int, action: Action) -> None:
        """Starts a message, or hands it over to another stage of this rank."""
        outgoing = self.live[action.stage, action.micro_batch].outgoing
        value, readers = outgoing.pop((action.value, action.is_grad))
        if readers > 1:
            outgoing[action.value, action.is_grad] = value, readers - 1
        value = value.contiguous()
        if action.peer == self.program.rank:
            self.handed[action.message] = value
        else:
            self.messages.send(position, action, value)

    def receive(self, position: int, action: Action) -> None:
        """Waits for a message."""
        if action.peer == self.program.rank:
            value = self.handed.pop(action.message)
        else:
            value = self.messages.receive(position, action)
        live = self.live[action.stage, action.micro_batch]
        if action.is_grad:
            live.tangents.setdefault(action.value, {})[action.peer_stage] = value
        else:
            live.values[action.value] = value

    def reduce(self) -> None:
        """Adds up the gradients over the stages and ranks that hold the same parameters."""
        self._merge()
        if self.of.reduce is not None:
            self.of.reduce(self.gradients)
        if self.of.sharded is not None:
            self.gradients |= self.of.sharded.take_gradients()

    def _merge(self) -> None:
        """Adds up the gradients of this rank's stages, in their order."""
        for _, stage in sorted(self.of.stages.items()):
            for name, value in stage.sums.items():
                if name in self.gradients:
                    self.gradients[name] += value
                else:
                    self.gradients[name] = value
            stage.sums.clear()
