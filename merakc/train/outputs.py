"""What a call of a parallel model gives back: its outputs, and a loss that hands gradients out."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any

import torch
import torch.utils._pytree as pytree

from merakc.errors import ConfigError, PlanError, RecordError
from merakc.frontend.record import Recording
from merakc.ir.graph import OutputKind, TensorSpec
from merakc.lowering.lowered import Lowered, adapt_plan
from merakc.passes.batches.recorded import BatchRecording
from merakc.passes.batches.states import Kind, State

# What a step keeps of an output that nobody has asked for yet, in bytes of the whole batch: so
# little that it does not show beside what a small model's step holds. Scores of 10 classes for 800
# samples.
LITTLE_BYTES = 1 << 15


class HandOut(torch.autograd.Function):
    """Hands out gradients that the schedule has computed already."""

    @staticmethod
    def forward(
        ctx: Any,
        loss: torch.Tensor,
        gradients: list[torch.Tensor | None],
        behind: Callable[[float], None] | None,
        *_: Any,
    ) -> torch.Tensor:
        """The loss; `gradients` wait for its backward, which calls `behind` with its own."""
        ctx.gradients, ctx.behind = gradients, behind
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        """The gradients, times that of the loss; raises `ConfigError` the second time, and where
        they are to be differentiated (`create_graph`), which they would not be.
        """
        if torch.is_grad_enabled():
            raise ConfigError(
                "create_graph=True of a parallel model's loss: gradients that a step gives have no "
                "history, so that a penalty on them would train nothing; train this model in one "
                "process, or without the penalty"
            )
        # Let go of here, a gradient is taken over by its parameter, and not copied.
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise ConfigError(
                "backward() was called twice on one loss; each model(...) hands its gradients out "
                "once: call the model again"
            )
        scale = grad.item()
        if ctx.behind is not None:
            ctx.behind(scale)
        handed = [g if g is None or scale == 1.0 else g.mul_(scale) for g in gradients]
        gradients.clear()  # whoever looks sees that they are gone
        return None, None, None, *handed


def check_finite(recording: Recording, loss: torch.Tensor) -> None:
    """Raises `RecordError` for a loss of which the forward was recorded as if it were finite."""
    if recording.finite and not loss.isfinite():
        raise RecordError(
            f"the loss is {loss.item()}, and the forward asks for that at "
            f"{', '.join(recording.finite)}: what it does then is not recorded; look for the cause "
            "of the loss, or decide outside the forward what to do with the step"
        )


def loss_name(recording: Recording) -> str:
    """The name of the output that is the loss."""
    return next(o.name for o in recording.graph.outputs if o.kind is OutputKind.LOSS)


def names_of(recording: Recording) -> list[str]:
    """The names of the tensors that the forward returns, in their order."""
    names = {o.name for o in recording.graph.outputs}
    return [leaf for leaf in recording.outputs if isinstance(leaf, str) and leaf in names]


def told_name(recording: Recording, name: str) -> str:
    """The name of an output as users are told it: `logits`, `more.scores`."""
    told = ".".join(part for part in re.split(r"[\[\]'\".]+", name) if part)
    return told.removeprefix("outputs.") if recording.is_beside else told


def outputs_of(
    recording: Recording,
    found: Mapping[str, torch.Tensor],
    missing: Callable[[str], Any],
) -> Any:
    """The forward's own output with the tensors that were found, and what stands for others."""
    names = set(names_of(recording))
    leaves: list[Any] = []
    for leaf in recording.outputs:
        if isinstance(leaf, str) and leaf in names:
            value = found[leaf] if leaf in found else missing(leaf)
            is_number = leaf in recording.numbers and leaf in found
            leaves.append(value.item() if is_number else value)
        else:
            leaves.append(leaf)
    return pytree.tree_unflatten(leaves, recording.structure)


def adapted(
    lowered: Lowered,
    recording: BatchRecording,
    *,
    results: bool = False,
    kept: Collection[str] = (),
) -> Lowered:
    """`adapt_plan`, with small outputs too that a step for the loss computes in any case: where it
    can keep them, and not where it runs micro-batches in parts, which keep nothing.
    """
    in_parts = any(count > 1 for count in lowered.plan.sub_batches)
    small = set() if in_parts or not recording.has_loss else _small(recording)
    if small - set(kept):
        with suppress(PlanError, RecordError):
            return adapt_plan(lowered, recording, results=results, kept={*kept, *small})
    return adapt_plan(lowered, recording, results=results, kept=kept)


def _small(recording: BatchRecording) -> set[str]:
    graph, found, parts = recording.graph, recording.found, recording.layout.parts
    made = {o.ref.node for o in graph.outputs if o.kind is OutputKind.LOSS}
    for node in reversed(graph.nodes):
        if node.name in made:
            made.update(ref.node for ref in node.refs)
    specs = graph.specs()
    states: dict[str, State | None] = {o.name: None for o in graph.outputs}
    if found is not None and parts > 1:
        states = {o.name: found.states[o.ref] for o in found.part.outputs}
    if len(states) < len(graph.outputs):  # lists, which cannot be kept
        return set()
    return {
        o.name
        for o in graph.outputs
        if o.kind is OutputKind.RESULT and o.ref.node in made and is_little(specs[o.ref], parts)
        and ((state := states[o.name]) is None
             or (state.kind is not Kind.COUPLED and (state.rows or not state.sampled)))
    }  # fmt: skip


def is_little(spec: TensorSpec | torch.Tensor, parts: int = 1) -> bool:
    """Whether so many tensors are no more than `LITTLE_BYTES`."""
    return math.prod(spec.shape) * spec.dtype.itemsize * parts <= LITTLE_BYTES
