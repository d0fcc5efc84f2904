"""One compiled form of the step, and what every run of it asks of its graphs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from merakc.ir.batches import BatchLayout, Rows
from merakc.ir.graph import Input, InputKind, OutputKind, TensorSpec
from merakc.ir.program import StageGraphs
from merakc.lowering.lowered import Lowered
from merakc.passes.batches.recorded import BatchRecording
from merakc.passes.programs.collectives import trained
from merakc.runtime.executor import Executor
from merakc.train.besides import Besides
from merakc.train.knowledge import Knowledge
from merakc.train.lengths import Facts, facts
from merakc.train.unused import Uses, doubtful

Tensors = dict[str, torch.Tensor]


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

    def let_go(self) -> CompiledStep:
        """The same without the nodes of its graphs, of which a model has many for many shapes.

        `Steps.whole` makes them again.
        """
        lowered, recording = self.lowered, self.recording
        light = replace(
            self,
            recording=replace(
                recording, graph=recording.graph.without_nodes(), full=None, found=None
            ),
            lowered=lowered.without_nodes(),
            chunks={},
        )
        vars(light).update({name: getattr(self, name) for name in OF_GRAPHS})
        for stage in self.executor.stages.values():
            stage.let_go()
        return light

    @cached_property
    def trained(self) -> frozenset[str]:
        """The names of the parameters that the loss gives a gradient to."""
        return frozenset(trained(self.lowered.loss.graph))

    @cached_property
    def doubtful(self) -> Uses:
        """The parameters that a batch may leave unused."""
        return doubtful(self.lowered.loss.graph, self.lowered.loss.head)

    @cached_property
    def runs_modules(self) -> bool:
        """Whether code of the user's runs in it: modules as they are, custom functions."""
        loss = self.lowered.loss
        graphs = [loss.graph, *([loss.head.graph] if loss.head is not None else [])]
        return any(g.functions for g in graphs)

    @cached_property
    def loss_dtype(self) -> torch.dtype | None:
        """The dtype of the loss; None where the forward returns none for this batch."""
        loss = self.lowered.loss
        graph = loss.head.graph if loss.head is not None else loss.graph
        refs = [o.ref for o in graph.outputs if o.kind is OutputKind.LOSS]
        return graph.specs()[refs[0]].dtype if refs else None

    @property
    def has_loss(self) -> bool:
        """Whether the forward returns a loss for this batch."""
        return self.loss_dtype is not None

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


# What a step asks of its graphs, once.
OF_GRAPHS = tuple(n for n, own in vars(CompiledStep).items() if isinstance(own, cached_property))
