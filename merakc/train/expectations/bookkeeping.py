"""Writes the ledger of a run: what its steps really took, in the file that `merakc diff` reads.

Every rank measures its own actions and rank 0 writes, after one small all-gather a step. Nothing is
measured where no ledger is asked for.
"""

from __future__ import annotations

import math
import platform
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from merakc.costs.device import Place, collective_seconds, rank_place, work_seconds
from merakc.costs.spent import Total, by_rank, merged, rank_totals
from merakc.costs.stages import optimizer_seconds
from merakc.costs.state import Precision
from merakc.costs.work.kernels import Kernel, KernelKind, graph_work
from merakc.costs.work.sharded import OPTIMIZER_STATES
from merakc.errors import LedgerError, MerakWarning
from merakc.ir.ledger import Header, Modelled, StepLine, line_text
from merakc.ir.program import ActionKind
from merakc.lowering.lowered import Lowered
from merakc.machines.cluster import Cluster
from merakc.runtime.executor import StepResult
from merakc.runtime.groups import from_rank_0, together
from merakc.runtime.host import is_beside
from merakc.runtime.live_bytes import LiveBytes
from merakc.runtime.part import plain
from merakc.simulation.simulate import Simulation
from merakc.train.steps import Steps
from merakc.version import __version__

# Of a CPU nothing says how much memory a step takes but counting every storage, which is slow: one
# step is counted, the third, when the optimizer has its state.
COUNTED_STEP = 2
# Python lets another thread run every 5 ms, in which many small actions fit: what lets go of sent
# values would come too late to be seen.
SWITCH_INTERVAL_S = 1e-5
_PER_KEY = 3  # numbers that a rank tells of each stage and kind: count, seconds, those of waiting
_Key = tuple[int, str]


class Bookkeeper:
    """Measures the training steps of one rank, and writes those of all on rank 0.

    All ranks make it together; it raises `LedgerError` on all where the file cannot be written.
    """

    def __init__(self, path: str | Path, steps: Steps, header: Header) -> None:
        self.path, self.steps = Path(path), steps
        self.digest = from_rank_0(lambda: _begin(self.path, header))
        self.keys = _keys(steps.planned)
        self.taken = 0
        self.peak_bytes = math.nan
        self.waited_s = 0.0  # for collectives over dp, before this step
        self.broken = False
        self.optimizers = _Optimizers(
            [t for t in steps.state.values() if t.requires_grad], steps.device
        )
        steps.recording = True

    @contextmanager
    def step(self) -> Iterator[None]:
        """What is run while it is entered is a training step."""
        self.waited_s = self._waited_s()
        self.peak_bytes = math.nan
        device = self.steps.device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            yield
            self.peak_bytes = float(torch.cuda.max_memory_allocated(device))
        elif self.taken == COUNTED_STEP:
            interval_s = sys.getswitchinterval()
            sys.setswitchinterval(SWITCH_INTERVAL_S)
            try:
                with LiveBytes(self._alive()) as counted:
                    yield
            finally:
                sys.setswitchinterval(interval_s)
            self.peak_bytes = float(counted.peak_bytes)
        else:
            yield

    def write(self, result: StepResult) -> None:
        """Writes what the step took; every rank calls it."""
        totals = rank_totals(result.events, result.collectives)
        own = [max((e.end_s for e in result.events), default=0.0)]
        own += [self.optimizers.take_s(), self._waited_s() - self.waited_s, self.peak_bytes]
        for key in self.keys:
            total = totals.get(key, Total())
            own += [float(total.count), total.seconds, total.waited_s]
        everyone = self._gathered(own)
        if self.steps.groups.rank == 0 and not self.broken:
            text, self.digest = line_text(self._line(everyone), self.digest)
            self._append(text)
        self.taken += 1

    def _append(self, text: str) -> None:
        """A run goes on where its ledger cannot be written any more."""
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            self.broken = True
            warnings.warn(f"the ledger ends here: {error}", MerakWarning, stacklevel=4)

    def _gathered(self, own: Sequence[float]) -> list[list[float]]:
        group = self.steps.groups.axis("world")
        if group is None:
            return [list(own)]
        mine = torch.tensor(own, dtype=torch.float64)
        everyone = [torch.empty_like(mine) for _ in range(group.size())]
        dist.all_gather(everyone, mine, group=group)
        return [each.tolist() for each in everyone]

    def _line(self, everyone: Sequence[Sequence[float]]) -> StepLine:
        """The line of a step, of what each rank tells."""
        mesh = self.steps.planned.plan.mesh
        ranks = [dict(zip(self.keys, _totals(own[4:]), strict=True)) for own in everyone]
        optimizer_s = [own[1] for own in everyone if not math.isnan(own[1])]

        def most(at: int) -> tuple[float, ...]:
            """By pipeline rank; empty where it was not measured."""
            found = [0.0] * mesh.pp
            for rank, own in enumerate(everyone):
                if math.isnan(own[at]):
                    return ()
                place = mesh.coordinates(rank)[1]
                found[place] = max(found[place], own[at])
            return tuple(found)

        peaks = most(3)
        return StepLine(
            self.taken, max(own[0] for own in everyone), max(optimizer_s, default=None),
            merged(ranks), most(2), tuple(map(int, peaks)),
            counted=bool(peaks) and self.steps.device.type == "cpu",
        )  # fmt: skip

    def _waited_s(self) -> float:
        """Of a CPU: on a GPU the host does not stand still for collectives."""
        if self.steps.device.type != "cpu":
            return math.nan
        buckets = self.steps.sharded.buckets if self.steps.sharded else ()
        return sum(b.gathering.waited_s + b.reducing.waited_s for b in buckets)

    def _alive(self) -> Iterator[torch.Tensor]:
        """What a step finds alive: the state, its gradients, buckets, and the optimizers' own."""
        steps = self.steps
        for tensor in steps.state.values():
            if is_beside(plain(tensor)):
                continue
            yield plain(tensor)
            if tensor.grad is not None:
                yield plain(tensor.grad)
        for step in steps.compiled.values():
            for stage in step.executor.stages.values():
                yield from stage.constants.values()
        if steps.sharded:
            yield from (b.kept for b in steps.sharded.buckets if not b.fetched)
        yield from self.optimizers.state()


class _Optimizers:
    """Times the steps of the optimizers, whichever they are, that update some of these tensors."""

    def __init__(self, tensors: Sequence[torch.Tensor], device: torch.device) -> None:
        self.own = {id(t) for t in tensors}
        self.device = device
        self.known: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self.start_s = 0.0
        self.seconds = math.nan
        here = weakref.ref(self)  # the hooks stay, and must not keep the model alive

        def told(method: Callable[[_Optimizers, torch.optim.Optimizer], None]) -> Any:
            def hook(optimizer: torch.optim.Optimizer, *_: object) -> None:
                found = here()
                if found is not None and found._is_own(optimizer):
                    method(found, optimizer)

            return hook

        register_optimizer_step_pre_hook(told(_Optimizers._begins))
        register_optimizer_step_post_hook(told(_Optimizers._ends))

    def take_s(self) -> float:
        """Their seconds since this was last asked; NaN where none took a step."""
        found, self.seconds = self.seconds, math.nan
        return found

    def state(self) -> Iterator[torch.Tensor]:
        """The tensors that they keep."""
        for optimizer in self.known:
            for parameter, values in optimizer.state.items():
                if is_beside(plain(parameter)):
                    continue
                yield from (plain(v) for v in values.values() if isinstance(v, torch.Tensor))

    def _is_own(self, optimizer: torch.optim.Optimizer) -> bool:
        if optimizer not in self.known:
            held = (id(p) for group in optimizer.param_groups for p in group["params"])
            if self.own.isdisjoint(held):
                return False
            self.known.add(optimizer)
        return True

    def _begins(self, _: torch.optim.Optimizer) -> None:
        self.start_s = self._now_s()

    def _ends(self, _: torch.optim.Optimizer) -> None:
        before_s = 0.0 if math.isnan(self.seconds) else self.seconds
        self.seconds = before_s + self._now_s() - self.start_s

    def _now_s(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return perf_counter()


def make_header(
    steps: Steps, simulation: Simulation, cluster: Cluster, *, measured: bool
) -> Header:
    """The header of a run; collective. `cluster` is what the plan was made or simulated for."""
    plan, prediction = steps.planned.plan, steps.file.prediction
    assert prediction is not None
    mesh = plan.mesh
    is_cpu = steps.device.type == "cpu"
    device = platform.processor() or platform.machine()
    inside = simulation.collectives_inside(range(mesh.world_size))
    hardware = cluster.described(mesh.world_size)
    place = rank_place(hardware, len(hardware.devices), plan.tp, cp=plan.cp)
    trained = [t for t in steps.state.values() if t.requires_grad]
    size = max((t.itemsize for t in trained), default=4)
    most = max(together(lambda: sum(t.numel() for t in trained)))
    return Header(
        plan=plan.hash,
        model=plan.model,
        degrees={"dp": plan.dp, **plan.form.degrees, "pp": plan.pp},
        micro_batches=plan.micro_batches,
        device=device if is_cpu else torch.cuda.get_device_name(steps.device),
        versions={
            "merakc": __version__, "torch": torch.__version__, "python": platform.python_version(),
        },
        hardware=hardware,
        origin="measured" if measured else "modelled",
        prediction=prediction,
        expected=merged(by_rank(simulation.events, inside)),
        modelled=modelled(steps.planned, cluster),
        optimizer_s=optimizer_seconds(
            most, Precision(size, size, OPTIMIZER_STATES * size), place
        ),
        stretch=simulation.stretch,
    )  # fmt: skip


def modelled(lowered: Lowered, cluster: Cluster) -> tuple[Modelled, ...]:
    """What formulas say of each stage, on one tp rank and micro-batch."""
    hardware = cluster.described(lowered.plan.mesh.world_size)
    plan = lowered.plan
    place = rank_place(hardware, len(hardware.devices), plan.tp, cp=plan.cp)
    found = []
    for stage, graph in enumerate(lowered.stages.local):
        work = graph_work(graph)
        forward_s = _compute_seconds(work.forward, place, place.factors.forward)
        backward_s = _compute_seconds(work.backward, place, place.factors.backward)
        wire_s = sum(_wire_seconds(w, place) for w in (work.forward, work.backward))
        found.append(Modelled(stage, forward_s, backward_s, wire_s))
    return tuple(found)


def _compute_seconds(kernels: Mapping[Kernel, int], place: Place, factor: float) -> float:
    computes = {k: n for k, n in kernels.items() if k.kind is not KernelKind.COLLECTIVE}
    return work_seconds(computes, place, factor)


def _wire_seconds(kernels: Mapping[Kernel, int], place: Place) -> float:
    return sum(
        count * collective_seconds(kernel, place)
        for kernel, count in kernels.items()
        if kernel.kind is KernelKind.COLLECTIVE
    )


def _begin(path: Path, header: Header) -> str:
    """Writes the header in the place of what was there; returns its digest."""
    text, digest = line_text(header, "")
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise LedgerError(f"{path}: cannot be written ({error}); give another path") from None
    return digest


def _keys(lowered: Lowered) -> list[_Key]:
    """The stages and kinds of all ranks' actions."""
    actions = (a for program in lowered.programs() for a in program.actions)
    kinds = {(a.stage, str(a.kind)) for a in actions if a.kind is not ActionKind.SEND}
    return sorted(kinds | {(stage, str(ActionKind.GATHER)) for stage, _ in kinds})


def _totals(numbers: Sequence[float]) -> Iterator[Total]:
    for at in range(0, len(numbers), _PER_KEY):
        yield Total(int(numbers[at]), numbers[at + 1], numbers[at + 2])
