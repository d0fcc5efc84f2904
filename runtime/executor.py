"""Executes one rank's Program on torch.distributed.

Receives are posted a few compute actions ahead, sends are asynchronous, gradients are added up in
the parameters' own dtype and reduced once, at the end of the step.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from merakc.ir.graph import Graph, Input, InputKind, OutputKind, Ref, TensorSpec
from merakc.ir.program import Action, ActionKind, Chunk, Event, Program
from merakc.kernels.ops import returns_view
from merakc.runtime.codegen import compile_graph

Tensors = dict[str, torch.Tensor]
# Receives posted ahead of need: the next compute action's and the one after.
LOOKAHEAD = 2
COMPUTE = (ActionKind.FORWARD, ActionKind.BACKWARD)


@dataclass(slots=True)
class StepResult:
    """What one step leaves on this rank.

    `loss` is the sum over this rank's micro-batches, None on ranks without the loss. `gradients`
    are by the parameter's name. `results` are the other outputs of each micro-batch, by name.
    """

    loss: torch.Tensor | None
    gradients: Tensors
    results: list[Tensors]
    events: tuple[Event, ...]


@dataclass(slots=True)
class _MicroBatch:
    """What is alive of one micro-batch."""

    inputs: Tensors  # batch tensors and scalars, by input name
    activations: Tensors = field(default_factory=dict)  # received, by value name
    outgoing: Tensors = field(default_factory=dict)  # computed, to be sent
    saved: Tensors = field(default_factory=dict)
    tangents: Tensors = field(default_factory=dict)  # received gradients, added up


class Executor:
    """Runs a Program again and again, on new micro-batches.

    `state` holds the parameters, buffers and constants by the graph's input names; buffers are
    written in place. `reduce` is called once a step with the gradients. `groups` are those that
    activations and gradients are sent over: two, since NCCL starts the messages of two ranks in
    the order of the calls, and a receive posted ahead must not hold up a send the other way.
    """

    def __init__(
        self,
        program: Program,
        chunk: Chunk,
        state: Tensors,
        device: torch.device,
        *,
        recompute: bool = False,
        reduce: Callable[[Tensors], None] | None = None,
        groups: tuple[dist.ProcessGroup | None, dist.ProcessGroup | None] = (None, None),
    ) -> None:
        self.program, self.chunk, self.state, self.device = program, chunk, state, device
        self.recompute, self.reduce, self.groups = recompute, reduce, groups
        self.forward = compile_graph(chunk.forward, device)
        self.backward = compile_graph(chunk.backward, device) if chunk.backward else None
        self.targets = {i.name: i.target for i in chunk.forward.inputs}
        self.specs = _message_specs(chunk)
        self.tags = _message_tags(program)
        self.kept = {i.name for i in chunk.backward.inputs} if chunk.backward else set()
        written = {o.name for o in chunk.forward.outputs if o.kind is OutputKind.BUFFER}
        self.rewritten = [
            i.name
            for i in chunk.forward.inputs
            if i.target in written and (recompute or i.name in self.kept)
        ]
        self.owned = _owned_gradients(chunk.backward) if chunk.backward else set()

    def measure(self, repeats: int = 2) -> tuple[float, float]:
        """Seconds of this rank's forward and of its backward, on values of no meaning.

        The first run of each warms up and does not count, the fastest does. All ranks of a tp
        group must call it together: the graphs hold their collectives.
        """
        forward, backward = self.chunk.forward, self.chunk.backward
        times: list[tuple[float, float]] = []
        with torch.no_grad():
            for _ in range(repeats + 1):
                values = {i.name: self._stand_in(i) for i in forward.inputs}
                start = self._now()
                outs = self.forward(list(values.values()))
                middle = self._now()
                if backward is not None and self.backward is not None:
                    saved = {o.name: v for o, v in zip(forward.outputs, outs, strict=True)}
                    del outs
                    self.backward(
                        [
                            saved.pop(i.target) if i.kind is InputKind.SAVED
                            else values.get(i.name, self._stand_in(i))
                            for i in backward.inputs
                        ]
                    )  # fmt: skip
                times.append((middle - start, self._now() - middle))
        return min(f for f, _ in times[1:]), min(b for _, b in times[1:])

    def _stand_in(self, item: Input) -> torch.Tensor:
        """A parameter or buffer itself, and zeros for what a step would bring."""
        if (item.target or item.name) in self.state:
            return self.state[item.target or item.name]
        return torch.zeros(item.spec.shape, dtype=item.spec.dtype, device=self.device)

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def run(self, micro_batches: Sequence[Tensors]) -> StepResult:
        """One step. `micro_batches[j]` maps input names to the tensors of micro-batch j."""
        step = _Step(self, [_MicroBatch(dict(m)) for m in micro_batches])
        with torch.no_grad():
            step.run()
        return StepResult(step.loss, step.gradients, step.results, tuple(step.events))


class _Step:
    """The state of one step."""

    def __init__(self, executor: Executor, micro_batches: list[_MicroBatch]) -> None:
        self.of, self.micro_batches = executor, micro_batches
        self.loss: torch.Tensor | None = None
        self.gradients: Tensors = {}
        self.results: list[Tensors] = [{} for _ in micro_batches]
        self.events: list[Event] = []
        self.sends: deque[tuple[dist.Work, torch.Tensor]] = deque()
        self.receives: dict[int, tuple[dist.Work, torch.Tensor]] = {}
        self.posted = 0

    def run(self) -> None:
        """All actions in order."""
        actions = self.of.program.actions
        origin = time.perf_counter()
        for k, action in enumerate(actions):
            start = time.perf_counter()
            self._post_receives(k)
            HANDLERS[action.kind](self, k, action)
            end = time.perf_counter()
            if action.kind is not ActionKind.SEND:
                self.events.append(
                    Event(self.of.program.rank, str(action), action.kind, start - origin,
                          end - origin)
                )  # fmt: skip
        for work, _ in self.sends:
            work.wait()

    def _post_receives(self, now: int) -> None:
        """Posts every receive up to the `LOOKAHEAD`-th compute action from here."""
        actions = self.of.program.actions
        computes = 0
        position = now
        while position < len(actions) and computes < LOOKAHEAD:
            action = actions[position]
            computes += action.kind in COMPUTE
            if action.kind is ActionKind.RECV and position >= self.posted:
                spec = self.of.specs[action.value]
                buffer = torch.empty(spec.shape, dtype=spec.dtype, device=self.of.device)
                group, tag = self.of.groups[action.is_grad], self.of.tags[position]
                work = dist.irecv(buffer, action.peer, group, tag)
                assert work is not None
                self.receives[position] = (work, buffer)
            position += 1
        self.posted = max(self.posted, position)

    def forward(self, _position: int, action: Action) -> None:
        """The forward of a micro-batch."""
        mb = self.micro_batches[action.micro_batch]
        graph = self.of.chunk.forward
        for name in self.of.rewritten:  # its backward wants the value from before this forward
            mb.inputs[name] = self._input(mb, name).clone()
        outs = self.of.forward([self._input(mb, i.name) for i in graph.inputs])
        self._take_outputs(graph, outs, mb, action.micro_batch)
        for name in list(mb.activations):
            if self.of.backward is None or (not self.of.recompute and name not in self.of.kept):
                del mb.activations[name]

    def _take_outputs(
        self, graph: Graph, outs: list[torch.Tensor], mb: _MicroBatch, index: int
    ) -> None:
        for out, value in zip(graph.outputs, outs, strict=True):
            if out.kind is OutputKind.LOSS:
                self.loss = value.clone() if self.loss is None else self.loss + value
            elif out.kind is OutputKind.RESULT:
                self.results[index][out.name] = value
            elif out.kind is OutputKind.BUFFER:
                self.of.state[out.name].copy_(value)
            elif out.kind is OutputKind.ACTIVATION:
                mb.outgoing[out.name] = value
            elif not self.of.recompute:
                mb.saved[out.name] = value

    def backward(self, _position: int, action: Action) -> None:
        """The backward of a micro-batch; with recomputation, its forward again before that."""
        mb = self.micro_batches[action.micro_batch]
        graph = self.of.chunk.backward
        if graph is None or self.of.backward is None:
            return
        if self.of.recompute:
            forward = self.of.chunk.forward
            outs = self.of.forward([self._input(mb, i.name) for i in forward.inputs])
            for out, value in zip(forward.outputs, outs, strict=True):
                if out.kind is OutputKind.SAVED:
                    mb.saved[out.name] = value
            del outs
        given = [self._backward_input(mb, i.name, i.kind, i.target, i.spec) for i in graph.inputs]
        mb.saved.clear()
        mb.activations.clear()
        mb.tangents.clear()
        found: Tensors = {}
        for out, value in zip(graph.outputs, self.of.backward(given), strict=True):
            if out.name in self.of.specs:
                mb.outgoing[out.name] = value
            else:
                found[out.name] = value
        self._accumulate(found)

    def _accumulate(self, gradients: Tensors) -> None:
        """Adds a micro-batch's gradients.

        The first ones are kept as they are where nothing else lives in their memory.
        """
        targets = self.of.targets
        old = [name for name in gradients if targets[name] in self.gradients]
        if old:
            torch._foreach_add_(
                [self.gradients[targets[n]] for n in old], [gradients[n] for n in old]
            )
        for name in (n for n in gradients if n not in set(old)):
            value = gradients[name]
            if name not in self.of.owned:
                value = value.clone(memory_format=torch.contiguous_format)
            self.gradients[targets[name]] = value

    def _input(self, mb: _MicroBatch, name: str) -> torch.Tensor:
        for values in (mb.inputs, mb.activations):
            if name in values:
                return values[name]
        return self.of.state[self.of.targets[name] or name]

    def _backward_input(
        self, mb: _MicroBatch, name: str, kind: InputKind, target: str, spec: TensorSpec
    ) -> torch.Tensor:
        if kind is InputKind.SAVED:
            return mb.saved.pop(target)
        if kind is not InputKind.TANGENT:
            return self._input(mb, name)
        if target in mb.tangents:
            return mb.tangents.pop(target)
        # The loss counts once; a sent value that no one differentiates counts nothing.
        fill = 0.0 if target in self.of.specs else 1.0
        return torch.full(spec.shape, fill, dtype=spec.dtype, device=self.of.device)

    def send(self, position: int, action: Action) -> None:
        """Starts a message; what is done already is let go."""
        mb = self.micro_batches[action.micro_batch]
        later = any(
            a.kind is ActionKind.SEND and a.message == action.message
            for a in self.of.program.actions[position + 1 : position + 1 + SENDS_APART]
        )
        value = mb.outgoing[action.value] if later else mb.outgoing.pop(action.value)
        value = value.contiguous()
        group, tag = self.of.groups[action.is_grad], self.of.tags[position]
        work = dist.isend(value, action.peer, group, tag)
        assert work is not None
        self.sends.append((work, value))
        while self.sends and self.sends[0][0].is_completed():
            self.sends.popleft()

    def receive(self, position: int, action: Action) -> None:
        """Waits for a message."""
        work, buffer = self.receives.pop(position)
        work.wait()
        mb = self.micro_batches[action.micro_batch]
        if not action.is_grad:
            mb.activations[action.value] = buffer
        elif action.value in mb.tangents:
            mb.tangents[action.value] += buffer
        else:
            mb.tangents[action.value] = buffer

    def reduce(self, _position: int, _action: Action) -> None:
        """Adds up the gradients over the ranks that hold the same parameters."""
        if self.of.reduce is not None:
            self.of.reduce(self.gradients)


# The sends of one value to several stages stand together: at most this many apart.
SENDS_APART = 64
HANDLERS: Mapping[ActionKind, Callable[[_Step, int, Action], None]] = {
    ActionKind.FORWARD: _Step.forward,
    ActionKind.BACKWARD: _Step.backward,
    ActionKind.SEND: _Step.send,
    ActionKind.RECV: _Step.receive,
    ActionKind.REDUCE: _Step.reduce,
}


def _message_specs(chunk: Chunk) -> dict[str, TensorSpec]:
    """The shape of every value that this stage exchanges; a gradient has its value's shape."""
    specs = chunk.forward.specs()
    found = {i.name: i.spec for i in chunk.forward.inputs if i.kind is InputKind.ACTIVATION}
    for out in chunk.forward.outputs:
        if out.kind is OutputKind.ACTIVATION:
            found[out.name] = specs[out.ref]
    return found


def _owned_gradients(backward: Graph) -> set[str]:
    """The gradients in memory of their own: made by a call that returns no view, and no other
    output is the same value or a view of it.
    """
    memory = {Ref(i.name): {Ref(i.name)} for i in backward.inputs}
    made: set[Ref] = set()
    for node in backward.nodes:
        own = {Ref(node.name, k) for k in range(len(node.outputs))}
        if returns_view(node.op):
            shared = set().union(*(memory[r] for r in node.refs))
            memory |= dict.fromkeys(own, shared)
        else:
            memory |= {ref: {ref} for ref in own}
            made |= own
    times = Counter(ref for o in backward.outputs for ref in memory[o.ref])
    return {o.name for o in backward.outputs if o.ref in made and times[o.ref] == 1}


def _message_tags(program: Program) -> dict[int, int]:
    """A tag for each message: its turn among those from one rank to the other."""
    turns: dict[tuple[int, ActionKind], int] = {}
    tags: dict[int, int] = {}
    for k, action in enumerate(program.actions):
        if action.kind in (ActionKind.SEND, ActionKind.RECV):
            key = action.peer, action.kind
            tags[k] = turns[key] = turns.get(key, -1) + 1
    return tags
