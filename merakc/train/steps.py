"""Compiled steps of one rank, by mode and shape of batch, and how a batch runs through them."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import nn

from merakc.batches.objects import check_objects
from merakc.batches.split import TensorSpecs, batch_size_of, signature, tensor_specs
from merakc.frontend.python.compared import Compared
from merakc.frontend.values.outside import LossFunction, WithLoss
from merakc.frontend.values.structures import open_dataclasses
from merakc.ir.batches import BatchLayout, Rows, ShareKind
from merakc.ir.graph import InputKind
from merakc.ir.plan_file import PlanFile
from merakc.ir.program import StageGraphs
from merakc.ir.same import Same
from merakc.kernels.collectives import AXES, bind_axis
from merakc.kernels.draws import step_seed
from merakc.lowering.forwards import surroundings
from merakc.lowering.lowered import Lowered
from merakc.lowering.overlap import with_parts
from merakc.lowering.recording import record_part
from merakc.machines.garbage import few_collections
from merakc.passes.batches.recorded import BatchRecording
from merakc.passes.programs.collectives import stage_touches, trained
from merakc.runtime.agreement import Agreement
from merakc.runtime.allocator import KeptMemory
from merakc.runtime.executor import Executor, StepResult
from merakc.runtime.fused import Fuser
from merakc.runtime.groups import Groups
from merakc.runtime.head import HeadRunner
from merakc.runtime.health.job import TIMEOUT_S
from merakc.runtime.loss_scale import LossScale
from merakc.runtime.sharded_state import ShardedState
from merakc.runtime.state import Placement, joined, tied_reducer
from merakc.runtime.streams import bring
from merakc.schedules.planned import with_fewer
from merakc.train.alike import check_alike
from merakc.train.batch_layout import dealt_over, layout_of
from merakc.train.batch_reads import BatchReads, micro_batches_of
from merakc.train.besides import Besides
from merakc.train.compiled_step import CompiledStep, Form, check_held
from merakc.train.knowledge import Knowledge
from merakc.train.lengths import check_lengths
from merakc.train.outputs import adapted, names_of, told_name
from merakc.train.settings import Settings
from merakc.train.told import warn_of_same, warn_of_shapes
from merakc.train.unused import drop_unused, forget

Tensors = dict[str, torch.Tensor]
# Compiled steps that one model has before it says that there are many, and that it keeps.
MANY_SHAPES, MAX_SHAPES = 8, 64


@dataclass(eq=False)
class Steps:
    """Everything that a rank needs to run batches: the plan, its state, its compiled steps.

    `state` holds this rank's parameters and buffers, which every compiled step shares.
    """

    source: nn.Module
    planned: Lowered
    file: PlanFile  # the plan, with what is known of it
    placements: Mapping[str, Placement]
    groups: Groups
    device: torch.device
    state: Tensors
    seed: int
    sharded: ShardedState | None = None
    timeout_s: float = TIMEOUT_S  # of a wait for other ranks
    loss_scale: LossScale = field(default_factory=lambda: LossScale(False, 1.0))
    fuser: Fuser | None = None  # where graphs become kernels of their own
    kept: KeptMemory | None = None  # on a CPU
    follows: bool = False  # whether batches that do not divide may be in fewer micro-batches
    compiled: dict[Any, CompiledStep] = field(default_factory=dict)
    same: Same = field(default_factory=Same)  # what steps keep alike
    fast: list[TensorSpecs] = field(default_factory=list)  # batches whose products oneDNN makes
    taken: int = 0  # training steps so far
    drawn: int = 0  # calls so far that have drawn random numbers: each draws others
    written: set[str] = field(default_factory=set)  # buffers that some rank's forwards write
    stale: set[str] = field(default_factory=set)  # buffers written since dp ranks shared them
    recording: bool = False  # whether the collectives of graphs are timed
    settings: Settings = field(init=False)  # modes and attributes of the model's own modules
    agreement: Agreement = field(init=False)  # says at every step whether ranks train alike
    reads: BatchReads = field(default_factory=BatchReads)
    whole: Tensors = field(default_factory=dict)  # the batch, where ranks are given the job's
    copied: bool = False  # whether that has so few samples that each dp rank runs all
    alike: bool = True  # whether the batches of dp ranks that run differ in their samples alone
    loss: LossFunction | None = None  # of the model's outputs, where it is computed outside
    compared: Compared = field(default_factory=Compared)  # forwards of any shape of batch
    wanted: frozenset[str] = frozenset()  # results that training steps keep
    reached: frozenset[str] = frozenset()  # the parameters that the last loss was made with
    takes_more: bool = False  # whether two steps were taken for one call
    roots: set[Hashable] = field(default_factory=set)  # marks of losses made outside
    # Where the samples stand in batches with what such losses read, by mark.
    readings: dict[Hashable, dict[str, Rows | None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Looks at the model's own modules, and at optimizers from here on."""
        self.settings = Settings(WithLoss(self.source, self.loss))
        self.compared.state = self.settings.state
        self.agreement = Agreement(self.groups, warn=warn_of_same if not self.groups.rank else None)
        living.add(self)

    def layout(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        dims: dict[str, Rows | None] | None = None,
        alone: bool = False,
    ) -> BatchLayout:
        """How the samples of the whole batch lie, of which this is a part, if not `alone`."""
        open_dataclasses((args, kwargs))
        if alone:
            self.whole = {}
            return BatchLayout((batch_size_of(args, kwargs),), 1)
        plan = self.planned.plan if dims is None else replace(self.planned.plan, batch_dims=dims)
        dp_rank, group = self.groups.coordinates[0], self.groups.axis("dp")
        how = {"follows": self.follows, "copied": self.copied}
        return layout_of(args, kwargs, plan, dp_rank, group, **how)

    @property
    def forward(self) -> nn.Module:
        """What is recorded: the model, with the loss where that is outside it."""
        return self.source if self.loss is None else WithLoss(self.source, self.loss)

    def key(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], layout: BatchLayout, form: Form
    ) -> tuple[Any, ...]:
        """What tells compiled steps apart."""
        settings, around = self.settings.now(), surroundings(self.device)
        return signature(args, kwargs), layout.sizes, settings, around, form

    def add(
        self,
        key: Any,
        recording: BatchRecording,
        lowered: Lowered,
        chunks: Mapping[int, StageGraphs],
        layout: BatchLayout,
    ) -> CompiledStep:
        """Compiles this rank's chunks, for batches that lie so, and keeps them under `key`.
        Collective over the ranks of this dp replica, whose steps must fit each other.
        """
        check_alike(lowered, chunks, self.groups.axis("model"), self.groups.coordinates[1])
        form, key = key[-1], self.reads.add(key, recording.reads, recording.of_whole)
        train = form.train and recording.has_loss
        program = lowered.programs(forward_only=not train)[self.groups.rank]
        if self.sharded is not None:
            touches = {stage: stage_touches(chunk) for stage, chunk in chunks.items()}
            program = lowered.with_collectives([program], touches, self.sharded.specs)[0]
        shared = self.placements, self.groups, lowered.loss.graph.told(trained), self.device
        reduce = self.sharded.sink_shared if self.sharded else tied_reducer(*shared)
        executor = Executor(
            program, chunks, self.state, self.device,
            reduce=reduce if train else None,
            channels=self.groups.channels(lowered.ways),
            timeout_s=self.timeout_s,
            sharded=self.sharded,
            fuser=self.fuser if train else None,
            head=self._head(lowered, layout, train=train),
            late=lowered.loss.written,
        )  # fmt: skip
        known, group = lowered.loss.known, dealt_over(layout, self.groups)
        whole = partial(joined, self.state, self.placements, groups=self.groups)
        before = Knowledge(known, layout, whole, self.device, group) if known else None
        besides = Besides(recording, layout, whole, self.device, group)
        step = CompiledStep(recording, layout, lowered, chunks, executor, before, besides, form)
        self.compiled[key] = step
        self.written |= step.writes
        return step

    def _head(self, lowered: Lowered, layout: BatchLayout, *, train: bool) -> HeadRunner | None:
        """What couples the samples of the whole batch, where this rank runs it."""
        head, chunk, stage = lowered.loss.head, lowered.head(train=train), lowered.head_stage
        group, own = dealt_over(layout, self.groups), self.groups.coordinates[1]
        if head is None or chunk is None or stage is None or lowered.plan.rank_of[stage] != own:
            return None
        return HeadRunner(head, chunk, layout, self.device, group, self.fuser if train else None)

    @few_collections()
    def compile(self, args: Sequence[Any], kwargs: Mapping[str, Any], form: Form) -> CompiledStep:
        """The compiled step for this batch, made and kept; without a loss it gives the results and
        does not train. Collective over dp, which says how many samples each rank has.
        """
        plan = self.planned.plan
        dims = plan.batch_dims if form.dims is None else form.dims
        layout = self.layout(args, kwargs, dims, alone=form.alone)
        layout = replace(layout, micro_batches=1) if form.undivided else layout
        key, self.alike = self.key(args, kwargs, layout, form), layout.alike
        known = self.reads.key(
            key,
            lambda parts: micro_batches_of(args, kwargs, plan, dims, parts or layout.micro_batches),
        )
        if known in self.compiled:
            self.compiled[known] = found = self.compiled.pop(known)  # the last used stand last
            return found
        check_objects((args, kwargs))
        for step in self.compiled.values():
            step.besides.take_back()
        if len(self.compiled) == MANY_SHAPES and self.groups.rank == 0:
            warn_of_shapes(MANY_SHAPES, MAX_SHAPES)
        if len(self.compiled) == MAX_SHAPES:
            del self.compiled[next(iter(self.compiled))]
        # Of each product of each shape oneDNN keeps half a megabyte, or loses it: it is for what is
        # planned, and for what is trained first, which may be a dp rank's part of that.
        given = Counter(tensor_specs(args, kwargs))
        if form.train and not self.taken and len(self.fast) == 1:
            self.fast.append(list(given.elements()))
        onednn = self.planned.onednn and any(Counter(own) <= given for own in self.fast)
        made = self._lowered(args, kwargs, layout, form, onednn=onednn)
        light = self.add(key, *made, layout).let_go(self.same)
        self.compiled[next(reversed(self.compiled))] = light
        del made
        gc.collect(0)  # what compiling has made, and not let go of, is much
        return light

    def with_graphs(
        self, step: CompiledStep, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> CompiledStep:
        """A step for the loss of this batch with its graphs, made again where it let go of them."""
        if step.chunks:
            return step
        with torch.set_grad_enabled(step.executor.reduce is not None):
            onednn = step.lowered.onednn
            made = self._lowered(args, kwargs, step.layout, step.form, onednn=onednn)
        return replace(step, recording=made[0], lowered=made[1], chunks=made[2])

    def _lowered(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        layout: BatchLayout,
        form: Form,
        *,
        onednn: bool,
    ) -> tuple[BatchRecording, Lowered, dict[int, StageGraphs]]:
        """What a step for this batch is compiled from."""
        plan = self.planned.plan
        dims = plan.batch_dims if form.dims is None else form.dims

        def recorded(micro_batches: int) -> BatchRecording:
            return record_part(
                form.module or self.forward, args, kwargs,
                replace(layout, micro_batches=micro_batches),
                self.device, plan.precision, couplings=plan.couplings, dims=dims,
                divided=bool(plan.sub_batches), compared=self.compared,
            )  # fmt: skip

        recording, plan = recorded(layout.micro_batches), with_fewer(plan, layout.micro_batches)
        train = form.train and recording.has_loss
        results = form.results or not recording.has_loss
        kept = {
            name for name in names_of(recording)
            if form.kept is None or told_name(recording, name) in form.kept
        }  # fmt: skip
        planned = replace(self.planned, plan=plan, onednn=onednn)
        lowered = adapted(planned, recording, results=results, kept=kept)
        if train and not (results or kept):
            lowered = with_parts(lowered, recorded, layout.own)
        check_held(lowered, self.placements)
        with torch.autocast(self.device.type, enabled=False):  # its casts are in the recording
            return recording, lowered, lowered.rank_graphs(self.groups.rank, train=train)

    def close(self) -> None:
        """Forgets steps and process groups; nothing runs any more."""
        self.agreement.close()
        self.compiled.clear()
        self.groups.made.clear()

    def bind(self) -> None:
        """Binds the axes of graphs to this model's groups: another model may have other groups."""
        for axis in AXES:
            if (group := self.groups.axis(axis)) is not None:
                bind_axis(axis, group)

    def draw(self, step: CompiledStep) -> int:
        """The number by which a call that runs this step draws. No other call has it."""
        number, self.drawn = self.drawn, self.drawn + step.draws
        return number

    def run(
        self, step: CompiledStep, args: Sequence[Any], kwargs: Mapping[str, Any], number: int
    ) -> StepResult:
        """One step of this rank, which draws by this number."""
        self.bind()
        self.settings.keep()
        batches = self.batches(step, args, kwargs)
        self.reads.agree(step.recording.reads, group := dealt_over(step.layout, self.groups))
        if not self.alike:
            check_lengths(step.facts, group)
        copy = self.groups.coordinates[0] * (step.layout.copies > 1)  # of one batch, as is right
        self.agreement.given([*pytree.tree_leaves((args, kwargs)), self.settings.seen[1], copy])
        self.agreement.common = {n: batches[0][n] for n in step.common} | self.whole
        self.agreement.beside = step.beside(batches[0])
        self.agreement.forward = step.mark if self.alike else ""
        self._share_buffers()
        inputs, known = self.brought(step, batches, number)
        made = step.besides.before(batches, args, kwargs)
        if self.sharded is not None:
            self.sharded.begin(step.trained, step.executor.gradients)
        step.executor.loss_scale = self.loss_scale.scale / step.layout.copies
        forget(step.doubtful)
        with torch.autocast(self.device.type, enabled=False):
            result = step.executor.run(inputs, known, record=self.recording)
        world = self.groups.axis("world")
        unused = drop_unused(result.gradients, step.doubtful, world, self.device)
        self.reached = step.trained - unused
        self._write_buffers(step, result)
        self.stale |= step.written
        if self.kept is not None:
            self.kept.settle()
        if step.besides.after(made, args, kwargs) or step.runs_modules:
            self.settings.settle()
        return result

    def batches(
        self, step: CompiledStep, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> list[Tensors]:
        """The tensors of each micro-batch, by name, on this rank's device."""
        parts = micro_batches_of(args, kwargs, step.lowered.plan, step.recording.dims)
        return [{k: bring(v, self.device) for k, v in part.items()} for part in parts]

    @torch.no_grad()
    def _write_buffers(self, step: CompiledStep, result: StepResult) -> None:
        """Writes the buffers that every part has read as they were before; collective over dp."""
        group = dealt_over(step.layout, self.groups)
        for name, parts in sorted(result.written.items()):
            value = parts[0]
            if step.lowered.loss.written[name] is ShareKind.SUM:
                value = torch.stack(parts).sum(0)
                if group is not None:
                    dist.all_reduce(value, group=group)
            self.state[name].copy_(value)

    def share_loss(self, step: CompiledStep, result: StepResult) -> tuple[torch.Tensor, bool]:
        """The loss of the whole batch, on every rank, and whether it and all gradients are finite,
        or nobody wants to know; takes the scale of the loss out of the gradients.

        Raises `MismatchError` on every rank where those of a dp replica were given other batches,
        or ranks with the same parameters train with other settings.
        """
        dp_rank, _, tp = self.groups.coordinates
        counts = tp == 0 and (dp_rank == 0 or step.layout.copies == 1)
        own, spec = result.loss if counts else None, step.loss_spec
        assert spec is not None
        shared = torch.zeros((), dtype=spec.dtype, device=self.device) if own is None else own
        bad = self.loss_scale.nonfinite(result.gradients)
        loss, found = self.agreement.share(shared.reshape(()), self.taken, bad)
        ignores = self.loss_scale.on_nonfinite == "ignore"
        return loss.reshape(spec.shape), not found and (ignores or bool(loss.isfinite()))

    def _share_buffers(self) -> None:
        """Gives all dp ranks the buffers that dp rank 0 has written, as
        `DistributedDataParallel` does before a forward.
        """
        group = self.groups.axis("dp")
        if group is not None:
            _, pipeline_rank, tp = self.groups.coordinates
            source = self.groups.mesh.rank(0, pipeline_rank, tp)
            for name in sorted(self.stale):
                dist.broadcast(self.state[name], source, group=group)
        self.stale.clear()

    def brought(
        self, step: CompiledStep, batches: Sequence[Tensors], number: int = 0
    ) -> tuple[list[Tensors], Tensors]:
        """What a step reads: of each micro-batch, by input name, and of the whole batch.

        Beside the batch's tensors that is what is known of the whole batch before the step, and
        the keys of random numbers, which the `number` of the call makes.
        """
        known = step.knowledge.run(batches) if step.knowledge is not None else {}
        found, seed = list[Tensors](), torch.tensor(step_seed(self.seed, number))
        for k, batch in enumerate(batches):
            own = step.knowledge.of_part(known, k) if step.knowledge is not None else {}
            numbers = {"seed": seed, "first_sample": torch.tensor(step.layout.first(k))}
            found.append(
                {i.name: (batch | own)[i.target] for i in step.brought[InputKind.BATCH]}
                | {i.name: bring(numbers[i.target].to(i.spec.dtype), self.device)
                   for i in step.brought[InputKind.SCALAR]}
            )  # fmt: skip
        of_whole = {"seed": bring(seed, self.device), "first_sample": torch.zeros_like(seed)}
        return found, known | of_whole


living: WeakSet[Steps] = WeakSet()  # whose groups are let go of before Python ends
