"""Compiled steps of one rank, by mode and shape of batch, and how a batch runs through them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from merakc.batch_reads import BatchReads
from merakc.batches import (
    batch_size_of,
    cast_floats,
    join_results,
    named_tensors,
    signature,
    split_batch,
)
from merakc.compiled_step import CompiledStep
from merakc.errors import MismatchError, PlanError
from merakc.frontend.record import Recording
from merakc.garbage import few_collections
from merakc.ir.graph import InputKind, OutputKind, Ref
from merakc.ir.program import ActionKind, Chunk
from merakc.kernels.collectives import bind_axis
from merakc.kernels.draws import step_seed
from merakc.overlap import with_parts
from merakc.passes.collectives import chunk_touches, trained
from merakc.passes.weigh_loss import MICRO_BATCH_SCALE
from merakc.planner import Lowered, adapt_plan
from merakc.recording import autocast_of, record_part
from merakc.runtime.allocator import KeptMemory
from merakc.runtime.codegen import compile_graph
from merakc.runtime.executor import TIMEOUT_S, Executor, StepResult
from merakc.runtime.fused import Fuser
from merakc.runtime.groups import Groups, reduce_tensors
from merakc.runtime.loss_scale import LossScale
from merakc.runtime.sharded_state import ShardedState
from merakc.runtime.state import Placement, digest
from merakc.runtime.trial import trial_seconds, zeros
from merakc.unused import forget, without_unused

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
    placements: Mapping[str, Placement]
    groups: Groups
    device: torch.device
    state: Tensors
    seed: int
    sharded: ShardedState | None = None
    timeout_s: float = TIMEOUT_S  # of a message
    loss_scale: LossScale | None = None  # in mixed precision
    fuser: Fuser | None = None  # where graphs become kernels of their own
    kept: KeptMemory | None = None  # on a CPU
    compiled: dict[Any, CompiledStep] = field(default_factory=dict)
    taken: int = 0  # training steps so far
    stale: set[str] = field(default_factory=set)  # buffers written since dp ranks shared them
    recording: bool = False  # whether the collectives of graphs are timed
    reads: BatchReads = field(default_factory=BatchReads)
    compared: bool = False  # whether the ranks of a dp replica were seen to be given one batch

    @cached_property
    def modules(self) -> tuple[nn.Module, ...]:
        """The model's own modules: to walk through them takes a step's time."""
        return tuple(self.source.modules())

    def key(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], *, train: bool, results: bool
    ) -> tuple[Any, ...]:
        """What tells compiled steps apart."""
        modes = tuple([m.training for m in self.modules])
        return signature(args, kwargs), modes, autocast_of(self.device), train, results

    def add(
        self,
        key: Any,
        recording: Recording,
        lowered: Lowered,
        chunks: Mapping[int, Chunk],
        *,
        train: bool,
    ) -> CompiledStep:
        """Compiles this rank's chunks and keeps them under `key`, for batches that answer as the
        recording's did.
        """
        key = self.reads.add(key, recording.reads)
        counting = lowered.loss.counts
        constants = counting.constants if counting else {}
        state = self.state | {name: value.to(self.device) for name, value in constants.items()}
        program = lowered.programs(forward_only=not train)[self.groups.rank]
        if self.sharded is not None:
            touches = {stage: chunk_touches(chunk) for stage, chunk in chunks.items()}
            program = lowered.with_collectives([program], touches, self.sharded.specs)[0]
        executor = Executor(
            program,
            chunks,
            state,
            self.device,
            reduce=self._reducer(lowered) if train else None,
            channels=self.groups.channels(lowered.plan.rank_of),
            timeout_s=self.timeout_s,
            sharded=self.sharded,
            fuser=self.fuser if train else None,
        )
        counts = compile_graph(counting, self.device) if counting else None
        step = CompiledStep(recording, lowered, chunks, executor, state, counts)
        self.compiled[key] = step
        return step

    @few_collections()
    def compile(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], *, train: bool, results: bool
    ) -> CompiledStep:
        """The compiled step for this batch: recorded, adapted to the plan, and kept.

        Where the forward returns no loss for this batch, it gives the results and does not train.
        No other rank takes part: ranks may meet a new shape at different times.
        """
        key = self.key(args, kwargs, train=train, results=results)
        known = self.reads.key(key, lambda: self._parts(args, kwargs))
        if known in self.compiled:
            self.compiled[known] = self.compiled.pop(known)  # the last used stand last
            return self.compiled[known]
        if len(self.compiled) == MANY_SHAPES:
            warnings.warn(
                f"merakc has compiled this model for {MANY_SHAPES} shapes of batch, or numbers "
                f"that its forward reads of batches, and keeps {MAX_SHAPES}; pad the batches to "
                "fewer shapes, or keep the numbers in tensors, to save the time",
                stacklevel=2,
            )
        if len(self.compiled) == MAX_SHAPES:
            del self.compiled[next(iter(self.compiled))]
        plan = self.planned.plan

        def recorded(micro_batches: int) -> Recording:
            source, precision = self.source, plan.precision
            return record_part(source, args, kwargs, micro_batches, self.device, precision)

        recording = recorded(plan.micro_batches)
        has_loss = any(o.kind is OutputKind.LOSS for o in recording.graph.outputs)
        train, results = train and has_loss, results or not has_loss
        lowered = adapt_plan(self.planned, recording, results=results)
        if train and not results:
            lowered = with_parts(lowered, recorded, batch_size_of(args, kwargs))
        self._check_held(lowered)
        with torch.autocast(self.device.type, enabled=False):  # its casts are in the recording
            chunks = lowered.chunks(self.groups.rank, train=train)
        return self.add(key, recording, lowered, chunks, train=train)

    def _parts(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensors]:
        """The tensors of each micro-batch, by name."""
        plan = self.planned.plan
        dtype = plan.precision.dtype("compute") if plan.precision else None
        parts = split_batch(*cast_floats(args, kwargs, dtype), plan.micro_batches)
        return [named_tensors(*part) for part in parts]

    def _check_held(self, lowered: Lowered) -> None:
        """Refuses a recording that wants parameters elsewhere than they are."""
        tp, layouts = lowered.plan.tp, lowered.stages.sharding.layouts
        rank_of = lowered.plan.rank_of
        for stage, graph in enumerate(lowered.stages.graphs):
            for item in graph.inputs:
                if item.kind not in (InputKind.PARAMETER, InputKind.BUFFER):
                    continue
                place, layout = self.placements[item.target], layouts[Ref(item.name)]
                same = place.layout.local_shape(tp, 0) == layout.local_shape(tp, 0)
                if rank_of[stage] not in place.ranks or not same:
                    raise PlanError(
                        f"with this batch or mode stage {stage} reads {item.kind} "
                        f"'{item.target}' as {layout}; by the plan stages {list(place.stages)} "
                        f"hold it as {place.layout}; plan in this mode, with this batch"
                    )

    def close(self) -> None:
        """Forgets the compiled steps and the process groups; nothing runs any more."""
        self.compiled.clear()
        self.groups.made.clear()

    def trial(self, step: CompiledStep, *, alone: bool) -> dict[int, dict[ActionKind, float]]:
        """Measured seconds of this rank's computes of a micro-batch, by stage; collective, where it
        is not `alone` (`trial_seconds`).

        None at all where, alone, the graph does not run on the zeros that stand in for a batch: an
        index made from them may be out of range. All ranks of a tp group fail alike.
        """
        self._bind()
        if self.sharded is not None:
            self.sharded.begin(step.trained, step.executor.gradients)
        errors = (ArithmeticError, LookupError, RuntimeError, ValueError) if alone else ()
        with suppress(*errors):
            return trial_seconds(step.executor, alone=alone)
        return {}

    def around(self, step: CompiledStep) -> None:
        """What a step does before and after its Program, on values of no meaning; collective."""
        counting = step.lowered.loss.counts
        wanted = (*step.brought[InputKind.BATCH], *(counting.inputs if counting else ()))
        batch = {i.target: zeros(i.spec, self.device) for i in wanted if i.kind is InputKind.BATCH}
        micro_batches = self.planned.plan.micro_batches
        self._scalars(step, [batch] * micro_batches, micro_batches)
        self.share_loss(step, StepResult(None, {}, [], (), ()))

    def _bind(self) -> None:
        """Binds the tp axis to this model's group: another model may have other groups."""
        group = self.groups.axis("tp")
        if group is not None:
            bind_axis("tp", group)

    def run(self, step: CompiledStep, args: Sequence[Any], kwargs: Mapping[str, Any]) -> StepResult:
        """One step of this rank."""
        self._bind()
        parts = self._parts(args, kwargs)
        batches = [{k: v.to(self.device) for k, v in part.items()} for part in parts]
        self.reads.agree(step.recording.reads, self.groups.axis("dp"))
        if not self.compared:
            self._compare_batches(args, kwargs)
        self._share_buffers()
        scalars = self._scalars(step, batches, batch_size_of(args, kwargs))
        inputs = [
            {i.name: batch[i.target] for i in step.brought[InputKind.BATCH]} | scalar
            for batch, scalar in zip(batches, scalars, strict=True)
        ]
        if self.sharded is not None:
            self.sharded.begin(step.trained, step.executor.gradients)
        if self.loss_scale is not None:
            step.executor.loss_scale = self.loss_scale.scale
        forget(step.doubtful)
        with torch.autocast(self.device.type, enabled=False):
            result = step.executor.run(inputs, record=self.recording)
        self.stale |= step.written
        if self.kept is not None:
            self.kept.settle()
        return result

    def _compare_batches(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Compares the first batch over the ranks of a dp replica: a sampler that counts ranks
        in place of dp ranks would train on garbage.
        """
        self.compared = True
        group = self.groups.axis("model")
        if group is None:
            return
        own = digest(named_tensors(args, kwargs).values())
        digests = [""] * group.size()
        dist.all_gather_object(digests, own, group=group)
        odd = [r for r, d in zip(dist.get_process_group_ranks(group), digests, strict=True)
               if d != digests[0]]  # fmt: skip
        if odd:
            raise MismatchError(
                f"ranks {odd} were given another batch than rank "
                f"{dist.get_process_group_ranks(group)[0]}, with which they form one data-parallel "
                "replica; pick batches by model.data_parallel_rank, not by the global rank"
            )

    def gradients(self, step: CompiledStep, result: StepResult) -> Tensors:
        """The gradients of what the step used, without the scale of the loss; none, where a rank's
        are not finite.
        """
        world = self.groups.axis("world")
        found = without_unused(result.gradients, step.doubtful, world, self.device)
        if self.loss_scale is None:
            return found
        return found if self.loss_scale.finite(found, world) else {}

    def share_loss(self, step: CompiledStep, result: StepResult) -> torch.Tensor:
        """The loss of the whole batch, on every rank."""
        _, _, tp = self.groups.coordinates
        own = result.loss if result.loss is not None and tp == 0 else None
        shared = torch.zeros((), dtype=step.loss_dtype, device=self.device) if own is None else own
        shared = shared.reshape(()).clone()
        world = self.groups.axis("world")
        if world is not None:
            dist.all_reduce(shared, group=world)
        return shared

    def share_results(self, step: CompiledStep, result: StepResult, size: int) -> Tensors:
        """The results of all micro-batches of `size` samples, joined, on every rank of this dp
        replica.
        """
        dp, own, tp = self.groups.coordinates
        group = self.groups.axis("pp")
        found: Tensors = {}
        for name, (owner, spec) in step.result_specs.items():
            parts = [r[name] for r in result.results] if owner == own else []
            if group is not None:
                source = self.groups.mesh.rank(dp, owner, tp)
                for k in range(len(result.results)):
                    if owner != own:
                        empty = torch.empty(spec.shape, dtype=spec.dtype, device=self.device)
                        parts.append(empty)
                    parts[k] = parts[k].contiguous()
                    dist.broadcast(parts[k], source, group=group)
            found[name] = join_results(parts, size)
        return found

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

    def _scalars(self, step: CompiledStep, batches: Sequence[Tensors], size: int) -> list[Tensors]:
        """The numbers that the graph wants: loss weights over the whole batch, and the keys of
        random numbers. `size` is the number of samples of this dp rank: of every one, it is held.
        """
        each = size // len(batches)
        first = self.groups.coordinates[0] * size
        numbers = self._loss_weights(step, batches)
        numbers["seed"] = torch.tensor(step_seed(self.seed, self.taken))
        found: list[Tensors] = []
        for k in range(len(batches)):
            numbers["first_sample"] = torch.tensor(first + k * each)
            found.append(
                {
                    i.name: numbers[i.target].to(self.device, i.spec.dtype)
                    for i in step.brought[InputKind.SCALAR]
                }
            )
        return found

    def _loss_weights(self, step: CompiledStep, batches: Sequence[Tensors]) -> Tensors:
        """One over the number of valid labels of the whole batch, dp ranks included."""
        micro_batches = len(batches) * self.planned.plan.dp
        weights = {MICRO_BATCH_SCALE: torch.tensor(1 / micro_batches, dtype=torch.float64)}
        counting = step.lowered.loss.counts
        if counting is None or step.counts is None:
            return weights
        counted = [
            torch.stack(
                step.counts(
                    [b[i.target] if i.kind is InputKind.BATCH else step.state[i.target or i.name]
                     for i in counting.inputs]
                )
            )
            for b in batches
        ]  # fmt: skip
        total = torch.stack(counted).sum(0)
        group = self.groups.axis("dp")
        if group is not None:
            dist.all_reduce(total, group=group)
        names = [o.name for o in counting.outputs]
        return weights | {n: 1 / value for n, value in zip(names, total, strict=True)}

    def _reducer(self, lowered: Lowered) -> Callable[[Tensors], None]:
        """Sums the gradients of a tied parameter over the ranks that share it."""
        if self.sharded is not None:
            return self.sharded.sink_shared
        wanted = trained(lowered.loss.graph)
        _, own, _ = self.groups.coordinates
        tied: list[tuple[dist.ProcessGroup, list[str]]] = []
        for ranks in sorted({p.ranks for p in self.placements.values() if len(p.ranks) > 1}):
            group = self.groups.holders(ranks)  # all ranks make every group
            if group is not None and own in ranks:
                held = [n for n, p in self.placements.items() if p.ranks == ranks]
                tied.append((group, sorted(wanted.intersection(held))))

        def reduce(gradients: Tensors) -> None:
            for group, names in tied:
                for name in names:
                    if name not in gradients:
                        gradients[name] = self._zeros(name)
                reduce_tensors([gradients[n] for n in names], group)

        return reduce

    def _zeros(self, name: str) -> torch.Tensor:
        place, (_, _, tp_rank) = self.placements[name], self.groups.coordinates
        shape = place.layout.local_shape(self.groups.mesh.tp, tp_rank)
        return torch.zeros(shape, dtype=place.dtype, device=self.device)
