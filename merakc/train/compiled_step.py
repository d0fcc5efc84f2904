"""One compiled form of the step, and what every run of it asks of its graphs."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from merakc.errors import PlanError
from merakc.frontend.python.fingerprint import fingerprint
from merakc.ir.batches import BatchLayout, Rows
from merakc.ir.graph import Input, InputKind, OutputKind, Ref, TensorSpec
from merakc.ir.program import StageGraphs
from merakc.ir.same import Same
from merakc.lowering.lowered import Lowered
from merakc.passes.batches.analyse import Analysis
from merakc.passes.batches.recorded import BatchRecording
from merakc.passes.batches.states import Kind
from merakc.passes.programs.collectives import trained
from merakc.runtime.executor import Executor
from merakc.runtime.state import Placement
from merakc.train.besides import Besides
from merakc.train.knowledge import Knowledge
from merakc.train.lengths import Facts, facts
from merakc.train.outputs import names_of
from merakc.train.unused import Uses, doubtful


@dataclass(frozen=True)
class Form:
    """What a compiled step gives beside the loss: nothing, the results that are `kept`, all of them
    where that is None; or, with `results`, everything that the forward returns, untrained, of all
    samples at once where it is `undivided`, and of this rank's alone where it is `alone`: what dp
    ranks are given is no batch together.

    `module` is recorded in place of the model, `mark` tells such modules apart; `dims` says where
    samples stand in its batch, where the plan does not.
    """

    train: bool
    results: bool = False
    undivided: bool = False
    alone: bool = False
    kept: frozenset[str] | None = frozenset()
    mark: Hashable = None
    module: nn.Module | None = field(default=None, compare=False)
    dims: dict[str, Rows | None] | None = field(default=None, compare=False)


@dataclass(frozen=True)
class CompiledStep:
    """One compiled form of the step: for one mode and one shape of batch.

    `layout` says how the samples of its batches lie; `knowledge` is what runs before it,
    `besides` does what it does beside computing.
    """

    recording: BatchRecording
    layout: BatchLayout
    lowered: Lowered
    chunks: Mapping[int, StageGraphs]
    executor: Executor
    knowledge: Knowledge | None
    besides: Besides
    form: Form

    def let_go(self, same: Same) -> CompiledStep:
        """The same without the nodes of its graphs, of which a model has many for many shapes, and
        with the `same` values as other steps have.

        `Steps.with_graphs` makes the nodes again.
        """
        lowered, recording = self.lowered, self.recording
        for name in OF_GRAPHS:
            getattr(self, name)  # which is kept
        light = self.but(
            recording=replace(
                recording, graph=recording.graph.without_nodes(same), full=None, found=None
            ),
            lowered=lowered.without_nodes(same),
            chunks={},
        )
        for stage in self.executor.stages.values():
            stage.let_go(same)
        self.executor.gradients = same(self.executor.gradients)
        vars(light)["trained"] = same(light.trained)
        return light

    def but(self, **changes: Any) -> CompiledStep:
        """The same with other fields; what was asked of its graphs is known still."""
        made = replace(self, **changes)
        vars(made).update({n: vars(self)[n] for n in OF_GRAPHS if n in vars(self)})
        return made

    @cached_property
    def trained(self) -> frozenset[str]:
        """The names of the parameters that the loss gives a gradient to."""
        return frozenset(self.lowered.loss.graph.told(trained))

    @cached_property
    def doubtful(self) -> Uses:
        """The parameters that a batch may leave unused."""
        return doubtful(self.lowered.loss.graph, self.lowered.loss.head)

    @cached_property
    def draws(self) -> bool:
        """Whether it draws random numbers, on any rank."""
        loss = self.lowered.loss
        inputs = [*loss.graph.inputs, *(loss.head.graph.inputs if loss.head is not None else ())]
        return any(i.kind is InputKind.SCALAR and i.target == "seed" for i in inputs)

    @cached_property
    def runs_modules(self) -> bool:
        """Whether code of the user's runs in it: modules as they are, custom functions."""
        loss = self.lowered.loss
        graphs = [loss.graph, *([loss.head.graph] if loss.head is not None else [])]
        return any(g.functions for g in graphs)

    @cached_property
    def loss_spec(self) -> TensorSpec | None:
        """The dtype of the loss and its shape, which may be [1]; None where the forward returns
        none for this batch.
        """
        loss = self.lowered.loss
        graph = loss.head.graph if loss.head is not None else loss.graph
        refs = [o.ref for o in graph.outputs if o.kind is OutputKind.LOSS]
        return graph.specs()[refs[0]] if refs else None

    @property
    def has_loss(self) -> bool:
        """Whether the forward returns a loss for this batch."""
        return self.loss_spec is not None

    @cached_property
    def brought(self) -> dict[InputKind, list[Input]]:
        """What a batch and its step bring, by kind."""
        found = self.lowered.loss.graph.inputs
        return {k: [i for i in found if i.kind is k] for k in (InputKind.BATCH, InputKind.SCALAR)}

    @cached_property
    def common(self) -> tuple[str, ...]:
        """The tensors of a batch that it reads, and that are the same for all dp ranks' samples."""
        loss, found = self.lowered.loss, self.recording.found
        if found is None or len(self.layout.sizes) == 1:
            return ()
        read = [*loss.graph.inputs, *(loss.known.part.inputs if loss.known else ())]
        names = {i.target for i in read if i.kind is InputKind.BATCH}
        own = {i.target for i in found.part.inputs if i.kind is InputKind.BATCH}
        return tuple(sorted(names & own - found.sampled.keys()))

    @cached_property
    def facts(self) -> Facts:
        """What it computes beside the number of samples."""
        found = self.recording.found
        if found is None or len(self.layout.sizes) == 1:
            return ()
        return facts(found, self.lowered.loss)

    @cached_property
    def mark(self) -> str:
        """The same on all dp ranks whose batches differ in their samples alone; empty of others."""
        found = self.recording.found
        if found is None or len(self.layout.sizes) == 1:
            return ""
        return fingerprint(found.whole).hash

    @cached_property
    def sampled(self) -> Mapping[str, Rows]:
        """Where the samples stand in its batch, where it has parts."""
        found = self.recording.found
        return found.sampled if found is not None else {}

    def beside(self, batch: Mapping[str, torch.Tensor]) -> dict[tuple[str, int], int]:
        """The sizes beside the samples in a batch, by tensor and dim: lengths, widths."""
        if not self.common:
            return {}
        return {
            (name, dim): size
            for name, rows in self.sampled.items() if name in batch
            for dim, size in enumerate(batch[name].shape) if dim != rows.dim
        }  # fmt: skip

    @cached_property
    def written(self) -> frozenset[str]:
        """The buffers that this rank's forwards write."""
        return frozenset().union(*(chunk.written for chunk in self.chunks.values()))

    @cached_property
    def writes(self) -> set[str]:
        """The buffers that the forwards of some rank write."""
        loss = self.lowered.loss
        found = {o.name for o in loss.graph.outputs if o.kind is OutputKind.BUFFER}
        return found | loss.written.keys()

    @cached_property
    def leans(self) -> frozenset[str]:
        """Of the buffers that the forwards write, those that something else is made with, too."""
        graph = self.lowered.loss.graph
        found = {o.ref.node for o in graph.outputs if o.kind is not OutputKind.BUFFER}
        for node in reversed(graph.nodes):
            if node.name in found:
                found.update(ref.node for ref in node.refs)
        buffers = [i for i in graph.inputs if i.kind is InputKind.BUFFER]
        return frozenset(i.target for i in buffers if i.name in found) & self.writes

    @cached_property
    def head_results(self) -> frozenset[str]:
        """The names of the results that the head gives, of the whole batch."""
        head = self.lowered.loss.head
        outputs = head.graph.outputs if head is not None else ()
        return frozenset(o.name for o in outputs if o.kind is OutputKind.RESULT)

    @cached_property
    def result_specs(self) -> dict[str, tuple[int, TensorSpec]]:
        """The pipeline rank and the spec of every result: of one micro-batch, or of the whole batch
        where the head gives it.
        """
        loss, stages = self.lowered.loss, self.lowered.stages
        rank_of, specs = self.lowered.plan.rank_of, loss.graph.specs()
        found = {
            o.name: (rank_of[stage], specs[o.ref])
            for stage, part in enumerate(stages.graphs)
            for o in loss.graph.outputs
            if o.kind is OutputKind.RESULT and any(p.name == o.name for p in part.outputs)
        }
        if loss.head is not None and stages.head is not None:
            whole = loss.head.graph.specs()
            found |= {
                o.name: (rank_of[stages.head], whole[o.ref])
                for o in loss.head.graph.outputs
                if o.kind is OutputKind.RESULT
            }
        return found

    @cached_property
    def has_effects(self) -> bool:
        """Whether the forward does something beside computing, on any rank: writes buffers or its
        batch, leaves things in Python.
        """
        return bool(self.writes or self.recording.left or self.recording.aside)

    @cached_property
    def output_forms(self) -> dict[str, torch.Tensor]:
        """A tensor without values for each that the forward returns, of this rank's samples."""
        return self._forms(self.layout.own)

    @cached_property
    def whole_output_forms(self) -> dict[str, torch.Tensor]:
        """The same of the samples of all dp ranks."""
        return self._forms(self.layout.total)

    def _forms(self, samples: int) -> dict[str, torch.Tensor]:
        """Those of a batch of so many samples, and of the whole batch where that is coupled."""
        graph = self.recording.graph
        found = self.recording.found if self.layout.parts > 1 else None
        grads, specs = graph.grad_values(), graph.specs()
        refs = {o.name: o.ref for o in graph.outputs}
        forms: dict[str, torch.Tensor] = {}
        for name in names_of(self.recording):
            shape, dtype = specs[refs[name]].shape, specs[refs[name]].dtype
            if found is not None:
                shape = _whole_shape(found, name, shape, samples)
            trained = refs[name] in grads and dtype.is_floating_point
            forms[name] = torch.empty(shape, dtype=dtype, device="meta", requires_grad=trained)
        return forms


def check_held(lowered: Lowered, placements: Mapping[str, Placement]) -> None:
    """Raises `PlanError` where a step wants parameters elsewhere than they are."""
    parts, sharding = lowered.plan.mesh.weight_ranks, lowered.stages.sharding
    rank_of = lowered.plan.rank_of
    for stage, graph in enumerate(lowered.stages.graphs):
        for item in graph.inputs:
            if item.kind not in (InputKind.PARAMETER, InputKind.BUFFER):
                continue
            place, layout = placements[item.target], sharding.weight_layout(Ref(item.name))
            same = place.layout.local_shape(parts, 0) == layout.local_shape(parts, 0)
            if rank_of[stage] not in place.ranks or not same:
                raise PlanError(
                    f"with this batch or mode stage {stage} reads {item.kind} "
                    f"'{item.target}' as {layout}; by the plan stages {list(place.stages)} "
                    f"hold it as {place.layout}; plan in this mode, with this batch"
                )


# What a step asks of its graphs, once.
OF_GRAPHS = tuple(n for n, own in vars(CompiledStep).items() if isinstance(own, cached_property))


def _whole_shape(
    found: Analysis, name: str, shape: tuple[int, ...], samples: int
) -> tuple[int, ...]:
    """The shape of an output for so many samples, of which `shape` is that of a part."""
    ref = next((o.ref for o in found.part.outputs if o.name == name), None)
    state = found.states[ref] if ref is not None else None
    if state is not None and state.rows is not None:
        return state.rows.sized(shape, samples)
    if state is not None and state.kind in (Kind.COUPLED, Kind.ROWS):
        whole = next(o.ref for o in found.whole.outputs if o.name == name)
        return found.whole.specs()[whole].shape
    return shape
