"""Whole recorded models in one process: eager against the graphs of all ranks and stages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn

from benchmarks.models import MODELS, Batch
from merakc.batches.split import named_tensors
from merakc.equality.casts import lifted_casts
from merakc.frontend.record import Recording, record
from merakc.ir.graph import Graph, InputKind, OutputKind, Ref
from merakc.ir.layout import Layout
from merakc.passes.autodiff.interpret import interpret
from merakc.passes.sharding.layouts import Sharding
from merakc.passes.sharding.spmd import spmd_partition
from tests.passes.lockstep import in_lockstep, relative_error

Tensors = dict[str, Tensor]
BOUND = (
    1e-11  # key biases, whose gradient is zero in theory, are rounding alone: see relative_error
)


@dataclass(frozen=True)
class Eager:
    """A recorded model with what eager computes for its batch, in float64."""

    model: nn.Module
    batch: Batch
    recording: Recording
    loss: Tensor
    gradients: Tensors
    buffers: Tensors  # after the forward
    state: Tensors  # before it, by the names of the graph


@cache
def eager(name: str) -> Eager:
    """One of the benchmarks' tiny models."""
    case = MODELS[name]
    return run_eager(case.model(torch.float64), case.batch(2, torch.float64))


def run_eager(model: nn.Module, batch: Batch) -> Eager:
    """Records a float64 model and runs it once, its own float32 casts lifted."""
    with lifted_casts():
        recording = record(model, (), batch)
        both = [*model.named_parameters(), *model.named_buffers()]
        state = {n: t.detach().clone() for n, t in both}
        loss = model(**batch)["loss"]
        loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    buffers = {n: b.clone() for n, b in model.named_buffers()}
    model.zero_grad()  # a later backward must not add to these gradients
    return Eager(model, batch, recording, loss.detach(), gradients, buffers, state)


def run_stages(
    case: Eager, graphs: list[Graph], layouts: dict[str, Layout], tp: int, rank: int
) -> tuple[Tensors, Tensors, Tensors]:
    """Forward of every stage in turn and one backward: losses, gradients, buffers of one rank.

    `graphs` are the rank's local graphs. Every scalar input is one.
    """
    batch = named_tensors((), case.batch)
    state: Tensors = {}
    for graph in graphs:
        for item in graph.inputs:
            if item.kind in (InputKind.PARAMETER, InputKind.BUFFER) and item.target not in state:
                part = layouts[item.target].take(case.state[item.target], tp, rank)
                state[item.target] = part.requires_grad_(item.requires_grad)
    sent: Tensors = {}
    losses: Tensors = {}
    buffers: Tensors = {}
    for graph in graphs:
        given: Tensors = {}
        for item in graph.inputs:
            if item.kind is InputKind.BATCH:
                given[item.name] = batch[item.target]
            elif item.kind is InputKind.SCALAR:
                given[item.name] = torch.ones((), dtype=item.spec.dtype)
            elif item.kind is InputKind.ACTIVATION:
                given[item.name] = sent[item.name]
            elif item.name not in graph.constants:
                given[item.name] = state[item.target]
            if item.name in given:
                assert tuple(given[item.name].shape) == item.spec.shape, item
        for out, value in zip(graph.outputs, interpret(graph, given), strict=True):
            kinds = {OutputKind.LOSS: losses, OutputKind.BUFFER: buffers}
            kinds.get(out.kind, sent)[out.name] = value
    torch.stack(list(losses.values())).sum().backward()
    gradients = {n: t.grad for n, t in state.items() if t.grad is not None}
    return {n: t.detach() for n, t in losses.items()}, gradients, buffers


def run_sharded(
    case: Eager, graphs: tuple[Graph, ...], sharding: Sharding
) -> tuple[list[Tensor], Tensors, Tensors]:
    """Loss of every rank, and joined gradients and buffers."""
    tp = sharding.tp
    written = [o for g in graphs for o in g.outputs if o.kind is OutputKind.BUFFER]
    layouts = {o.name: sharding.layouts[o.ref] for o in written}  # some are never read
    layouts |= {i.target: sharding.layouts[Ref(i.name)] for g in graphs for i in g.inputs}
    local = [[spmd_partition(g, sharding, rank) for g in graphs] for rank in range(tp)]
    ranks = in_lockstep(tp, lambda rank: run_stages(case, local[rank], layouts, tp, rank))

    def join(pick: Callable[[int], Tensors]) -> Tensors:
        return {n: layouts[n].join([pick(r)[n] for r in range(tp)]) for n in pick(0)}

    losses = [torch.stack(list(found.values())).sum() for found, _, _ in ranks]
    return losses, join(lambda r: ranks[r][1]), join(lambda r: ranks[r][2])


def compare(case: Eager, losses: list[Tensor], gradients: Tensors, buffers: Tensors) -> None:
    """Every loss, gradient and written buffer equals eager's to the rounding of float64."""
    assert max(relative_error(loss, case.loss) for loss in losses) < BOUND
    assert gradients.keys() == case.gradients.keys()
    for name, wanted in case.gradients.items():
        assert relative_error(gradients[name], wanted) < BOUND, name
    for name, found in buffers.items():
        assert relative_error(found.double(), case.buffers[name].double()) < BOUND, name
