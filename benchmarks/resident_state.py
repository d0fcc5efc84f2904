"""The bytes of parameters, gradients and optimizer state that are really alive on a rank.

Every tensor of the process that Python knows is found by the garbage collector; its storage counts
once, and as what it is reached from. Nothing is asked of the code that made it: neither its figures
nor its shapes.
"""

from __future__ import annotations

import gc
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

import merakc
from benchmarks.layouts import Task
from benchmarks.reference import split_batch, step_batch
from merakc.equality.compare import optimizer_for
from merakc.ir.program import Action, ActionKind
from merakc.runtime.executor import Step
from merakc.train.model import ParallelModel

Sizes = dict[int, int]  # bytes by a storage's address
LOOKS, LOOKS_APART_S = 3, 0.02
# What holds no tensor of a step; to walk through them would be to walk through all of Python.
CLOSED = (type, ModuleType, FunctionType, BuiltinFunctionType, str, bytes, int, float)


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes on one rank, whose part of the model has `elements` trained elements, by the first
    pipeline rank that has them: its shards are all holders'.

    `gradients` are those that are being added up, between two micro-batches, once their collectives
    have ended; `in_flight` what these hold besides until then. In mixed precision the optimizer's
    are also its masters. `gathered` are whole parameters that are held for their readers. The
    others are all else: buffers, constants, batches, activations.
    """

    elements: Mapping[int, int]
    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    gathered_bytes: int = 0
    in_flight_bytes: int = 0
    other_between_steps_bytes: int = 0
    other_between_micro_batches_bytes: int = 0


def resident_state(task: Task, dtype: torch.dtype = torch.float64) -> Held:
    """Trains two steps on this rank and weighs its state; collective."""
    gc.collect()
    before = _tensors(gc.get_objects())  # kept alive, so that no address is used again
    case, mesh = task.case, task.mesh
    rank = mesh.coordinates(dist.get_rank() if dist.is_initialized() else 0)[0]
    parts = split_batch(step_batch(case, task.batch_size, dtype, 0), mesh.dp)
    parallel = merakc.auto_parallel(
        case.model(dtype), parts[rank], dp=mesh.dp, tp=mesh.tp, pp=mesh.pp,
        micro_batches=task.micro_batches // mesh.dp, schedule=task.schedule,
        state_shards=task.state_shards, precision=task.precision,
    )  # fmt: skip
    optimizer = optimizer_for(parallel)
    scale = _Scale(parallel, optimizer, _sizes(before))
    for step in range(2):
        with scale.watching() if step else nullcontext():
            loss = parallel(**parts[rank])["loss"]
        loss.backward()
        del loss
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            scale.between_steps()
    assert scale.held is not None, "no micro-batch followed another"
    return scale.held


class _Scale:
    """Weighs a model's state between its steps, and then between two micro-batches."""

    def __init__(
        self, parallel: ParallelModel, optimizer: torch.optim.Optimizer, before: Sizes
    ) -> None:
        self.parallel, self.optimizer, self.before = parallel, optimizer, before
        self.steps = parallel._own("_steps")
        self.kept: Sizes = {}
        self.state: Sizes = {}
        self.other_bytes = 0
        self.held: Held | None = None

    def between_steps(self) -> None:
        """Finds what stays from step to step."""
        self.state = _sizes(
            value
            for own in self.optimizer.state.values()
            for value in own.values()
            if isinstance(value, torch.Tensor)
        )
        if self.parallel.plan.precision is not None:
            self.state |= _sizes(self.parallel.parameters())  # masters, which nothing computes with
        gathered = self._gathered()
        reached = _sizes(self.parallel.parameters()) | self._reached(self.steps.sharded)
        self.kept = _less(reached, self.state, gathered)
        self.other_bytes = sum(self._other(gathered).values())

    def watching(self) -> AbstractContextManager[Any]:
        """Weighs after the first backward of the next step."""
        return _after_compute(self._between_micro_batches)

    def _between_micro_batches(self, step: Step, action: Action) -> None:
        if action.kind is not ActionKind.BACKWARD or self.held is not None:
            return
        sharded = self.steps.sharded
        unsettled = self._gradients(step)
        for bucket in sharded.buckets if sharded is not None else ():
            bucket.finish()
        gradients, gathered = self._gradients(step), self._gathered()
        self.held = Held(
            _local_elements(self.parallel),
            sum(self.kept.values()),
            sum(gradients.values()),
            optimizer_bytes=sum(self.state.values()),
            gathered_bytes=sum(gathered.values()),
            in_flight_bytes=max(0, sum(unsettled.values()) - sum(gradients.values())),
            other_between_steps_bytes=self.other_bytes,
            other_between_micro_batches_bytes=sum(_less(self._other(gathered), gradients).values()),
        )

    def _gradients(self, step: Step) -> Sizes:
        sums = [stage.sums for stage in step.of.stages.values()]
        reached = self._reached((sums, step.gradients, self.steps.sharded))
        return _less(reached, self.kept, self.state, self._gathered())

    def _gathered(self) -> Sizes:
        sharded = self.steps.sharded
        held = sharded.held.values() if sharded is not None else ()
        return _less(_sizes(held), self.kept)

    def _other(self, gathered: Sizes) -> Sizes:
        gc.collect()  # what has left circles of references only waits for it
        known = self.before, self.kept, self.state, gathered
        seen = []
        for _ in range(LOOKS):  # gloo's threads let go of tensors a while after a wait has ended
            time.sleep(LOOKS_APART_S)
            seen.append(_less(_sizes(_tensors(gc.get_objects())), *known))
        return min(seen, key=lambda sizes: sum(sizes.values()))

    def _reached(self, root: object) -> Sizes:
        return _sizes(_tensors(reachable(root)))


def _local_elements(parallel: ParallelModel) -> dict[int, int]:
    """Elements of the trained parameters, or of their parts, that this rank's stages read."""
    found: Counter[int] = Counter()
    groups = parallel._own("_steps").groups
    pipeline_rank = groups.coordinates[1]
    for place in parallel._own("_steps").placements.values():
        if place.is_parameter and place.requires_grad and pipeline_rank in place.ranks:
            shape = place.layout.local_shape(groups.mesh.weight_ranks, groups.weight_rank)
            found[min(place.ranks)] += math.prod(shape)
    return dict(found)  # dataclasses.asdict does not know Counters


def reachable(root: object) -> list[Any]:
    """Every object that `root` leads to."""
    found: dict[int, Any] = {}
    fresh = [root]
    while fresh:
        fresh = [o for o in fresh if id(o) not in found and not isinstance(o, CLOSED)]
        found |= {id(o): o for o in fresh}
        fresh = gc.get_referents(*fresh)
    return list(found.values())


def _tensors(objects: Iterable[object]) -> list[torch.Tensor]:
    # By the type, since isinstance would ask lazily made objects for their class.
    return [o for o in objects if issubclass(type(o), torch.Tensor)]  # type: ignore[misc]


def _sizes(tensors: Iterable[torch.Tensor]) -> Sizes:
    """Bytes of the tensors' storages."""
    storages = (t.untyped_storage() for t in tensors)
    return {s._cdata: s.nbytes() for s in storages if s.device.type != "meta"}


def _less(sizes: Sizes, *others: Sizes) -> Sizes:
    return {key: size for key, size in sizes.items() if not any(key in o for o in others)}


def _after_compute(look: Callable[[Step, Action], None]) -> AbstractContextManager[Any]:
    """Calls `look` after each compute of every executor."""
    plain = Step.compute

    def compute(self: Step, action: Action) -> None:
        plain(self, action)
        look(self, action)

    return patch.object(Step, "compute", compute)
