"""Measures the computes of a rank as its Program orders them, without any other rank's values.

A graph that runs again and again by itself finds its memory in the caches and its gradients never
added up. A trial is a step without its messages and its collectives over dp: as many micro-batches
are alive as in a step, and gradients are accumulated.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import nullcontext
from dataclasses import replace
from statistics import fmean

import torch

from merakc.ir.graph import InputKind, TensorSpec
from merakc.ir.program import Action, ActionKind, Program
from merakc.runtime.executor import Executor, Step
from merakc.runtime.messages import Messages

# More are like the last of these.
MICRO_BATCHES = 8
BROUGHT = (InputKind.BATCH, InputKind.SCALAR)
MESSAGES = (ActionKind.SEND, ActionKind.RECV)


def trial_seconds(executor: Executor) -> dict[int, dict[ActionKind, float]]:
    """Mean seconds of each kind of compute of a micro-batch, by stage, on values of no meaning.

    All ranks of a tp group must call it together: the graphs hold their collectives; and with them
    those of dp, where parameters are gathered over it. Nothing that the rank holds is changed.
    """
    state, sharded = executor.state, executor.sharded
    kept = {n: state[n].clone() for s in executor.stages.values() for n in s.chunk.written}
    step = _step(executor)
    try:
        with torch.no_grad(), sharded.muted() if sharded else nullcontext():
            step.run()
    finally:
        for name, value in kept.items():
            state[name].copy_(value)
        if sharded is not None:
            sharded.end()
    seconds = step.clock.seconds
    found: dict[int, dict[ActionKind, list[float]]] = defaultdict(lambda: defaultdict(list))
    for action, start, end in step.done:
        if action.kind.is_compute:
            found[action.stage][action.kind].append(seconds(end) - seconds(start))
    return {s: {kind: fmean(each) for kind, each in own.items()} for s, own in found.items()}


def _step(executor: Executor) -> Step:
    """The step of the first micro-batches."""
    program = executor.program
    count = min(MICRO_BATCHES, 1 + max(a.micro_batch for a in program.actions))
    program = Program(
        program.rank,
        tuple(
            replace(a, collectives=())
            for a in program.actions
            if (a.kind.is_compute or a.kind in MESSAGES) and a.micro_batch < count
        ),
    )
    brought = {
        item.key: zeros(item.spec, executor.device)
        for stage in executor.stages.values()
        for piece in stage.pieces.values()
        for item in (piece.given if piece is not None else ())
        if item.kind in BROUGHT
    }
    messages = _NoMessages(
        program, executor.specs, executor.device, executor.channels, executor.timeout_s
    )
    return Step(executor, [brought] * count, record=True, program=program, messages=messages)


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
