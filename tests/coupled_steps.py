"""Steps of models that are cut where their samples meet, on real ranks, and in one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from merakc.ir.batches import BatchLayout
from merakc.ir.graph import InputKind, Ref
from merakc.ir.layout import Layout
from merakc.ir.program import Mesh
from merakc.ir.strategy import Strategy
from merakc.kernels.collectives import bind_axis
from merakc.lowering.lowered import Lowered, adapt_plan, make_plan
from merakc.machines.cluster import NOMINAL_CPU
from merakc.runtime.executor import Executor
from merakc.runtime.fused import Fuser
from merakc.runtime.groups import Groups
from merakc.runtime.head import HeadRunner
from merakc.train.knowledge import Knowledge
from tests.coupled_models import Coupled, Tensors

CPU = torch.device("cpu")


def reference(case: Coupled, samples: int) -> tuple[torch.Tensor, Tensors]:
    """The loss and the gradients of the plain model in one process."""
    model = case.model()
    loss = model(**case.batch(samples))["loss"]
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def planned(
    case: Coupled, mesh: Mesh, layout: BatchLayout, options: dict[str, Any]
) -> tuple[Lowered, list[Tensors]]:
    """The plan made of the first dp rank's part, for this one's; its micro-batches."""
    first = case.record(BatchLayout(layout.sizes, layout.micro_batches))
    lowered = make_plan(
        first, Strategy().on(mesh, micro_batches=layout.micro_batches, **options), NOMINAL_CPU
    )
    batch, each = case.rank_batch(layout), layout.each
    parts = [
        {n: v[j * each :][:each] for n, v in batch.items()} for j in range(layout.micro_batches)
    ]
    return adapt_plan(lowered, case.record(layout), results=case.results), parts


@dataclass(frozen=True)
class Ready:
    """A rank that can run a step on its micro-batches, and the layouts of its parameters."""

    lowered: Lowered
    executor: Executor
    inputs: Sequence[Tensors]
    known: Tensors
    layouts: Mapping[str, Layout]
    place: tuple[int, int, int]  # dp, pp, tp


def prepared(
    case: Coupled,
    mesh: Mesh,
    sizes: Sequence[int],
    micro_batches: int,
    options: dict[str, Any],
    *,
    train: bool = True,
    fuser: Fuser | None = None,
) -> Ready:
    """This rank, ready for a step."""
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    groups = Groups(mesh, rank)
    dp, own, tp = mesh.coordinates(rank)
    layout = BatchLayout(tuple(sizes), micro_batches, dp)
    lowered, parts = planned(case, mesh, layout, options)
    lowered = replace(lowered, compiled=fuser is not None)
    group = groups.axis("tp")
    if group is not None:
        bind_axis("tp", group)
    full = dict(case.model().named_parameters())
    layouts = lowered.stages.sharding.layouts
    held = {
        i.target: layouts[Ref(i.name)]
        for stage, graph in enumerate(lowered.stages.graphs)
        for i in graph.inputs
        if i.kind is InputKind.PARAMETER and lowered.plan.rank_of[stage] == own
    }
    state = {name: lay.take(full[name].detach(), mesh.tp, tp) for name, lay in held.items()}
    channels, dp_group = groups.channels(lowered.ways), groups.axis("dp")
    runner = None
    assert lowered.loss.head is not None
    assert lowered.stages.head is not None
    assert tuple(sorted(share.kind for share in lowered.loss.head.waist)) == case.ends
    if lowered.plan.rank_of[lowered.stages.head] == own:
        chunk = lowered.head(train=train)
        assert chunk is not None
        runner = HeadRunner(lowered.loss.head, chunk, layout, CPU, dp_group, fuser)
    executor = Executor(
        lowered.programs(forward_only=not train)[rank],
        lowered.rank_graphs(rank, train=train),
        state,
        CPU,
        channels=channels,
        head=runner,
        fuser=fuser,
    )
    known: Tensors = {}
    if lowered.loss.known is not None:
        buffers = dict(case.model().named_buffers())
        knowledge = Knowledge(lowered.loss.known, layout, buffers.__getitem__, CPU, dp_group)
        known = knowledge.run(parts)
        parts = [part | knowledge.of_part(known, j) for j, part in enumerate(parts)]
    names = {i.name: i.target for i in lowered.loss.graph.inputs if i.kind is InputKind.BATCH}
    inputs = [{name: part[target] for name, target in names.items()} for part in parts]
    return Ready(lowered, executor, inputs, known, held, (dp, own, tp))


def trained(*arguments: Any) -> dict[str, Any]:
    """A step of this rank, with its own gradients and where they belong."""
    ready = prepared(*arguments)
    ready.executor.run(ready.inputs, ready.known)
    result = ready.executor.run(ready.inputs, ready.known)
    return {
        "loss": result.loss if ready.place[2] == 0 else None, "gradients": result.gradients,
        "layouts": ready.layouts, "place": ready.place,
        "labels": [event.label for event in result.events],
    }  # fmt: skip


def joined(found: Sequence[dict[str, Any]], tp: int) -> Tensors:
    """The gradients of all parameters, from those of all ranks."""
    sums: dict[tuple[str, int], torch.Tensor] = {}
    layouts = {name: lay for f in found for name, lay in f["layouts"].items()}
    for f in found:
        for name, gradient in f["gradients"].items():
            key = name, f["place"][2]
            sums[key] = sums[key] + gradient if key in sums else gradient
    return {
        name: layout.join([sums[name, k] for k in range(tp)]) for name, layout in layouts.items()
    }
