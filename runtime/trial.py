"""Measures the computes of a rank in a step, on an example batch or on values of no meaning.

A graph that runs again and again by itself finds its memory in the caches, its gradients never
added up and no message beside it. A trial is a step: as many micro-batches are alive, gradients are
accumulated, ranks wait for each other and communicate. Whether a rank can take part it finds out
alone: one that fails would leave the others waiting.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import zip_longest
from statistics import fmean

import torch

from merakc.ir.graph import InputKind, TensorSpec
from merakc.ir.program import Action, ActionKind, Program
from merakc.kernels.checks import unchecked
from merakc.runtime.executor import Executor, Step, Tensors
from merakc.runtime.messages import Messages

# More are like the last of these.
MICRO_BATCHES = 8
BROUGHT = (InputKind.BATCH, InputKind.SCALAR, InputKind.KNOWN)
# What a rank alone runs too, in its way.
KEPT = (ActionKind.SEND, ActionKind.RECV, ActionKind.HEAD)


# What a step reads: of each micro-batch, by input name, and of the whole batch.
Brought = tuple[Sequence[Tensors], Tensors]


def trial_seconds(
    executor: Executor, brought: Brought | None = None, *, alone: bool
) -> dict[int, dict[ActionKind, float]]:
    """Mean seconds of each kind of compute of a micro-batch, by stage, on what is `brought`, else
    on zeros; of a compute with the sends after it. Of what couples the samples, those of the whole
    batch.

    All ranks must call it together. Where it is `alone`, without messages and what dp ranks share,
    for the first micro-batches: all ranks of a tp group, whose graphs hold their collectives, and
    those of dp, where parameters are gathered over it. Nothing that the rank holds is changed.
    """
    state, sharded = executor.state, executor.sharded
    kept = {n: state[n].clone() for s in executor.stages.values() for n in s.chunk.written}
    step = _step(executor, brought, alone=alone)
    try:
        muted = sharded.muted() if sharded and alone else nullcontext()
        with torch.no_grad(), unchecked(), muted:
            step.run()
    finally:
        step.close()
        for name, value in kept.items():
            state[name].copy_(value)
        if sharded is not None:
            sharded.end()
    seconds = step.clock.seconds
    found: dict[int, dict[ActionKind, list[float]]] = defaultdict(lambda: defaultdict(list))
    starts = [start for _, start, _ in step.done]
    for (action, start, end), follows in zip_longest(step.done, starts[1:]):
        if action.kind.is_compute or action.kind is ActionKind.HEAD:
            took_s = seconds(follows or end) - seconds(start)
            found[action.stage][action.kind].append(took_s)
    return {s: {kind: fmean(each) for kind, each in own.items()} for s, own in found.items()}


def _step(executor: Executor, brought: Brought | None, *, alone: bool) -> Step:
    """The step, or, alone, that of the first micro-batches."""
    program = executor.program
    count = 1 + max(a.micro_batch for a in program.actions)
    inputs, known = _zeros_for(executor, count) if brought is None else brought
    if not alone:
        return Step(executor, inputs, known, record=True)
    count = min(MICRO_BATCHES, count)
    program = Program(
        program.rank,
        tuple(
            replace(a, collectives=())
            for a in program.actions
            if (a.kind.is_compute or a.kind in KEPT) and a.micro_batch < count
        ),
    )
    messages = _NoMessages(
        program, executor.specs, executor.device, executor.channels, executor.timeout_s
    )
    return _AloneStep(
        executor, inputs[:count], known, record=True, program=program, messages=messages
    )


def _zeros_for(executor: Executor, micro_batches: int) -> Brought:
    """What stands in for a batch."""
    brought = {
        item.key: zeros(item.spec, executor.device)
        for stage in executor.stages.values()
        for piece in stage.pieces.values()
        for item in (piece.given if piece is not None else ())
        if item.kind in BROUGHT
    }
    of_batch = executor.head.brought if executor.head is not None else ()
    return [brought] * micro_batches, {i.name: zeros(i.spec, executor.device) for i in of_batch}


class _AloneStep(Step):
    """What couples samples waits for no other rank."""

    def couple(self, stage: int) -> None:
        """Runs it on zeros."""
        head = self.of.head
        assert head is not None, f"nothing couples samples on stage {stage}"
        self.waist.clear()
        waist = {s.name: zeros(s.spec, self.of.device) for s in head.head.waist}
        head.run(waist, self.known, self.of.loss_scale)


class _NoMessages(Messages):
    """Nobody gets what is sent, and zeros arrive."""

    def post_receives(self, now: int) -> None:
        """None will come."""

    def receive(self, position: int, action: Action) -> torch.Tensor:
        """Zeros of the value's shape."""
        return zeros(self.specs[action.stage, action.value], self.device)

    def send(self, position: int, action: Action, value: torch.Tensor) -> None:
        """Drops it."""


def zeros(spec: TensorSpec, device: torch.device) -> torch.Tensor:
    """What stands in for a value."""
    return torch.zeros(spec.shape, dtype=spec.dtype, device=device)
