"""`auto_parallel`: from a model and a batch to a model that trains on all ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from inspect import signature
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import nn

from merakc.batches.dims import GivenDims, parse_batch_dims
from merakc.batches.split import tensor_specs, tensors_of
from merakc.errors import ConfigError
from merakc.frontend.python.compared import Compared
from merakc.frontend.python.fingerprint import fingerprint
from merakc.frontend.record import Recording
from merakc.frontend.values.outside import LossFunction, WithLoss, parted
from merakc.frontend.values.structures import open_dataclasses
from merakc.ir.batches import WHOLE_BATCH, Couplings
from merakc.ir.plan import Plan
from merakc.ir.plan_file import PlanFile
from merakc.ir.precision import Precision, parse_precision
from merakc.ir.state import ShardsGiven
from merakc.kernels import gemm
from merakc.lowering.lowered import Lowered, apply_plan
from merakc.lowering.overlap import with_parts
from merakc.lowering.recording import with_loss
from merakc.machines.cluster import Cluster
from merakc.machines.garbage import few_collections
from merakc.machines.start import device_of
from merakc.passes.batches.recorded import BatchRecording
from merakc.planner.choose import choose
from merakc.planner.fit import Fit
from merakc.planner.readings import Readings
from merakc.planner.request import Request
from merakc.planner.requested import GivenPlan, for_forward, requested
from merakc.runtime.allocator import keep_freed_memory
from merakc.runtime.arena.places import Places
from merakc.runtime.fused import Fuser
from merakc.runtime.groups import Groups, agree, from_rank_0, together
from merakc.runtime.health.job import TIMEOUT_S, call
from merakc.runtime.loss_scale import OnNonfinite, check_on_nonfinite, loss_scale_for
from merakc.simulation.simulate import Simulation
from merakc.train.batch_layout import may_be_joined
from merakc.train.checkpoints.weight_files import Weights
from merakc.train.compiled_step import CompiledStep, Form
from merakc.train.expectations.bookkeeping import Bookkeeper, make_header
from merakc.train.expectations.expected import expected
from merakc.train.mirror import users_type
from merakc.train.model import AdaptedModel, ParallelModel
from merakc.train.outputs import adapted
from merakc.train.outside.within import is_adapted
from merakc.train.parameters.allocate import allocate
from merakc.train.parameters.optimizers import leave
from merakc.train.starting import machines_for, started
from merakc.train.steps import Steps
from merakc.train.told import begin, tell, telling, warn_of
from merakc.train.weights import check_is_plain, find_placements, opened, take_over
from merakc.version import __version__

# The steps of a rank, further names of tied tensors, what a step should cost, and the ledger.
Made = tuple[Steps, Mapping[str, str], Simulation, Bookkeeper | None]


def auto_parallel(
    model: nn.Module,
    batch: Any,
    *,
    batch_size: int | None = None,
    loss: LossFunction | None = None,
    whole_batches: bool = False,
    weights: str | Path | None = None,
    plan: GivenPlan | None = None,
    dp: int | None = None,
    tp: int | None = None,
    cp: int | None = None,
    ep: int | None = None,
    expert_load: Sequence[float] = (),
    pp: int | None = None,
    micro_batches: int | None = None,
    schedule: str | Path = "auto",
    recompute: str | float = "auto",
    sequence_parallel: bool | None = None,
    state_shards: ShardsGiven | None = None,
    precision: str | Precision | None = None,
    overlap: int | None = None,
    offload: str = "none",
    couplings: Couplings = WHOLE_BATCH,
    batch_dims: GivenDims | None = None,
    compile: bool = False,
    arena: bool = False,
    cluster: Cluster | None = None,
    device: torch.device | str | None = None,
    seed: int = 0,
    timeout_s: float = TIMEOUT_S,
    ledger: str | Path | None = None,
    on_nonfinite: OnNonfinite | None = None,
) -> ParallelModel:
    """Makes a model train on all ranks that `torchrun` started; raises `MerakError`s.

    Args:
        model: returns a loss, as `.loss`, `["loss"]`, first or alone, or gives `loss` its outputs;
            its weights are taken over.
        batch: one dp rank's example, by keyword (a mapping) or position; shapes may change later.
        batch_size: the samples of a step, over all dp ranks, for which the plan is made; if None,
            each dp rank's are as many as the example's.
        loss: `fn(outputs, batch)`, where the model returns none: the loss of what it returns, and
            of the batch as it is called with; of that, the model is given what its forward takes.
        whole_batches: whether `batch` is, and calls take, the whole job's, the same on every rank,
            as in one process; losses that are made outside then train at any dp.
        weights: a folder of safetensors files, as from `save_pretrained` or `merakc.save`, or one
            file: each rank reads its parts, in place of the model's own weights.
        plan: a plan, or its file, in place of a search; what that measured stands. Rank 0's counts.
        dp: data-parallel degree; chosen if None, as are tp and pp.
        tp: tensor-parallel degree.
        cp: ranks that hold the same parameters and each take a part of every sequence, beside tp.
        ep: the same, with the experts of mixtures shared among them; tp splits each expert.
        expert_load: how many tokens each expert gets, as predictions have it; if empty, all alike.
        pp: pipeline ranks.
        micro_batches: the parts of a dp rank's batch; fewer for others that do not divide.
        schedule: "auto", a name or an order of work, as text or in a file (`merakc.schedules`).
        recompute: "none", "full" (every layer, in its own backward), "selective" (but not products
            with weights), what a rank may hold ("40 GiB"), a share of what it holds without (0.5),
            "stage" (whole stages, by the schedule), or "auto" (as needed).
        sequence_parallel: whether what tp leaves whole runs on parts of sequences; chosen if None.
        state_shards: "zero-0" to "zero-3", or numbers of shards over dp, cp, ep; `parameters()`
            are then parts. Chosen if None.
        precision: "bf16-", "fp8-" or "fp16-mixed", or a `Precision`: masters for the optimizer.
        overlap: parts of a micro-batch, or of rows, tp's communication of one under other parts.
        offload: what lives on the host: "none", "auto" (what does not fit, no more), "optimizer",
            "activations", "parameters", how much a rank may move ("4 GiB"), or "optimizer, 4 GiB".
        couplings: whether the samples that a loss couples are the "whole batch"'s, or each of them
            "per micro-batch".
        batch_dims: where samples stand in tensors of the batch, by name: a dim, (dim, rows of
            each) or None; found if not given.
        compile: whether the graphs of stages become kernels of their own, by torch's compiler.
        arena: whether a step's memory on a CPU comes from one block, with places found ahead.
        cluster: the machines; if None, nominal ones for the plan, measured for the prediction.
        device: where this rank computes; its GPU if there is one, else the CPU.
        seed: of all that the forward draws, and of weights on the meta device.
        timeout_s: how long a rank waits for another; then all say which is lost (docs/faults.md).
        ledger: a file that rank 0 writes what each step really took to, for `merakc diff`.
        on_nonfinite: what all ranks do in a step whose loss or gradients are not finite on any:
            "raise" `NonfiniteError` (if None), "skip" it (if None, where the loss is scaled) or
            "ignore" that, and look at nothing.
    """
    asked = dict(locals())
    check_on_nonfinite(on_nonfinite)
    made = _made(asked, lambda: opened(model, weights))
    # A model that shares no parameters cannot ask for it; nor need its batch stay.
    again = partial(_made_again, {**asked, "batch": _kept(batch)}) if made[1] else None
    base = AdaptedModel if is_adapted(model) else ParallelModel
    kind: type[ParallelModel] = users_type(base, type(model))  # type: ignore[arg-type]
    parallel = kind(*made, again=again)
    parallel.read_whole_batches(whole_batches)
    return parallel


def _made(asked: Mapping[str, Any], open_weights: Callable[[], Weights | None]) -> Made:
    """What a parallel model is of, by the arguments of `auto_parallel`."""
    timeout_s, seed, on_nonfinite = asked["timeout_s"], asked["seed"], asked["on_nonfinite"]
    device = device_of(asked["device"])
    places = Places(device) if asked["arena"] else None
    world, fuser = started(device, asked["compile"], timeout_s)
    files = open_weights()
    agreed = f"seed={seed}, compile={asked['compile']}, on_nonfinite={on_nonfinite}"
    agreed += f", weights={files and files.fingerprint}"
    with telling() as teller, call("auto_parallel"):
        made = _decided(asked, world, device, agreed)
        teller.begin("compiling the stages")
        found = _build(
            made, files, asked["cluster"], seed, timeout_s=timeout_s, fuser=fuser,
            ledger=asked["ledger"], on_nonfinite=on_nonfinite,
        )  # fmt: skip
        teller.decided(found[0].file)
    if places is not None:  # that the plan is for, no others
        next(iter(found[0].compiled.values())).executor.places = places
    return found


def _made_again(
    asked: Mapping[str, Any], model: nn.Module, before: Plan, weights: Weights,
    options: Mapping[str, Any],
) -> Made:  # fmt: skip
    """The same for a model whose layers are no longer tied: `options` are asked for instead, and
    as many dp ranks as before, whose data stay theirs; the degrees of a plan that was given.
    """
    if unknown := sorted(options.keys() - (asked.keys() - {"model", "weights"})):
        raise ConfigError(f"{', '.join(unknown)}: no arguments of auto_parallel to be changed")
    kept = ("pp", "precision", "offload", "batch_dims", "couplings") if asked["plan"] else ()
    asked = {**asked, **{name: getattr(before, name) for name in kept}}
    if asked["plan"]:
        asked |= before.form.degrees
    asked |= {"dp": before.dp, "plan": None, "ledger": None}
    if "plan" in options:
        asked |= dict.fromkeys(("dp", "tp", "cp", "ep", "pp"))
    return _made(asked | dict(options) | {"model": model}, lambda: weights)


def _kept(batch: Any) -> Any:
    """A batch whose containers users cannot change any more."""
    open_dataclasses(batch)
    return pytree.tree_map(lambda leaf: leaf, batch)


def plan_for(model: nn.Module, batch: Any, **options: Any) -> Plan:
    """The plan that `auto_parallel` makes of the same arguments: its `dp` before the data are
    loaded. Nothing happens to the model; every rank must call it. Give it on, by `plan=`.
    """
    given = signature(auto_parallel).bind(model, batch, **options)
    given.apply_defaults()
    asked, device = given.arguments, device_of(given.arguments["device"])
    world, _ = started(device, compile=False, timeout_s=asked["timeout_s"])
    with telling(), call("plan_for"):
        return _decided(asked, world, device, "").lowered.plan


def _decided(asked: Mapping[str, Any], world: int, device: torch.device, agreed: str) -> _Decision:
    """What all ranks do about the arguments of `auto_parallel`."""
    open_dataclasses(asked["batch"])
    check_is_plain(asked["model"])
    names = (
        "micro_batches", "recompute", "sequence_parallel", "state_shards", "overlap", "offload",
    )  # fmt: skip
    request = Request(
        world, 0, asked["dp"], asked["tp"], asked["pp"], schedule=str(asked["schedule"]),
        precision=parse_precision(asked["precision"]), couplings=asked["couplings"],
        batch_dims=parse_batch_dims(asked["batch_dims"]), total_batch_size=asked["batch_size"],
        **{name: asked[name] for name in names},
    ).with_parts(asked["cp"], asked["ep"], asked["expert_load"])  # fmt: skip
    model, loss = asked["model"], asked["loss"]
    forward = model if loss is None else WithLoss(model, loss)
    given = asked["plan"], asked["cluster"], device, agreed
    return _decide(forward, asked["batch"], request, *given, whole=asked["whole_batches"])


@dataclass(frozen=True)
class _Decision:
    """What all ranks agree on; `example` is a batch of rank 0's shapes, of this rank's values."""

    model: nn.Module
    device: torch.device
    example: tuple[tuple[Any, ...], dict[str, Any]]
    recording: BatchRecording
    lowered: Lowered
    given: PlanFile | None
    fit: Fit
    compared: Compared
    outside: bool  # whether the loss is made outside, of outputs that steps return


@few_collections()
def _decide(
    model: nn.Module,
    batch: Any,
    fixed: Request,
    plan: GivenPlan | None,
    cluster: Cluster | None,
    device: torch.device,
    agreed: str,
    *,
    whole: bool,
) -> _Decision:
    """Rank 0 decides; every rank records and applies the plan. All have `agreed` in common."""
    asked = from_rank_0(lambda: requested(fixed, plan, batch, whole=whole))
    several = asked.likely_dp > 1 and len(asked.readings) > 1
    joined = several and may_be_joined(batch, asked.readings[0].batch_dims)
    forward = Readings(model, batch, asked, device, joined)
    if any(together(forward.needs_values)):
        forward.use(from_rank_0(lambda: [t.cpu() for t in tensors_of(batch)]))
    agreed += f", whole_batches={whole}"
    agree(lambda: _facts(model, with_loss(forward.first), fixed, agreed))
    outside = not isinstance(model, WithLoss) and forward.first.is_beside
    again = forward.first.checkpoints
    request = for_forward(forward.request, asked.plan, again, outside=outside and not whole)
    shared = not cluster and device.type == "cpu"
    fit = Fit(request, forward.of_samples, machines_for(cluster, device), shared)
    file, chosen = _plan(asked.file, fit)
    local = request.local_batch_size(file.decisions.dp)
    assert local is not None, "plans have a dp that divides the batch"
    sized = forward.of_size(local)
    lowered, recording = _lowered(file, chosen if sized is forward else None, sized)
    forward.compared.forget()
    return _Decision(
        model, device, sized.given, recording, lowered, given=asked.file, fit=fit,
        compared=forward.compared, outside=outside,
    )  # fmt: skip


@few_collections()
def _build(
    made: _Decision,
    files: Weights | None,
    cluster: Cluster | None,
    seed: int,
    *,
    timeout_s: float,
    fuser: Fuser | None,
    ledger: str | Path | None,
    on_nonfinite: OnNonfinite | None,
) -> Made:
    """This rank's part of the model. The prediction is measured where no `cluster` was given."""
    lowered, recording, (model, loss) = made.lowered, made.recording, parted(made.model)
    rank = dist.get_rank() if dist.is_initialized() else 0
    groups = Groups(lowered.plan.mesh, rank, timeout_s, made.device)
    groups.open()
    if groups.rank == 0:
        warn_of(lowered.plan, recording, outside=made.outside)
    placements = find_placements(model, lowered)
    held = {name: place.stages for name, place in placements.items() if place.is_parameter}
    plan = replace(lowered.plan, parameters=held)
    onednn = made.device.type == "cpu" and from_rank_0(gemm.is_faster)
    lowered = replace(lowered, plan=plan, compiled=fuser is not None, onednn=onednn)
    own = lowered if lowered.parts else adapted(lowered, recording)
    chunks = cache(lambda: own.rank_graphs(groups.rank))
    together(lambda: bool(chunks()))  # a rank that cannot differentiate its part says so to all
    state, sharded = allocate(placements, lowered, groups, made.device)
    leave(model)
    take_over(model, state, placements, groups, seed, files)
    scale = loss_scale_for(lowered.plan.precision, on_nonfinite)
    file = replace(made.given or PlanFile(plan), decisions=plan)
    steps = Steps(
        model, lowered, file, placements, groups, made.device, state=state, seed=seed,
        sharded=sharded, timeout_s=timeout_s, loss_scale=scale, fuser=fuser, loss=loss,
        follows=made.fit.request.micro_batches is None or plan.couplings == WHOLE_BATCH,
        compared=made.compared, fast=[tensor_specs(*made.example)],
    )  # fmt: skip
    layout = steps.layout(*made.example)
    key = steps.key(*made.example, layout, Form(train=True, mark=made.outside or None))
    step = steps.add(key, recording, own, chunks(), layout)
    steps.kept = keep_freed_memory() if made.device.type == "cpu" else None
    simulation, book = _priced(made, steps, step, ledger, measured=cluster is None)
    return steps, recording.aliases, simulation, book


def _priced(
    made: _Decision, steps: Steps, step: CompiledStep, ledger: str | Path | None, *, measured: bool
) -> tuple[Simulation, Bookkeeper | None]:
    """What a step should cost, and the ledger of what steps do. Raises `FitError`; collective."""
    machines = made.fit.cluster
    example = made.example if measured else None
    prediction, simulation, here = expected(steps, step, machines, example)
    from_rank_0(lambda: made.fit.check(prediction.peak_bytes, step.lowered.plan.mesh))
    steps.file = replace(steps.file, prediction=prediction, measured=here)
    if from_rank_0(lambda: ledger) is None:
        return simulation, None
    header = make_header(steps, simulation, machines, measured=measured)
    return simulation, Bookkeeper(ledger or "", steps, header)


def _facts(model: nn.Module, recording: Recording, fixed: Request, agreed: str) -> dict[str, str]:
    """What all ranks must have in common."""
    # Parameters in their order, by which they are gathered; buffers may stand in any.
    tensors = [*model.named_parameters(), *sorted(model.named_buffers())]
    told = [(name, tuple(t.shape), str(t.dtype), t.requires_grad) for name, t in tensors]
    digest = hashlib.sha256(repr(told).encode()).hexdigest()
    return {
        "versions": f"merakc {__version__}, torch {torch.__version__}",
        "arguments": f"{fixed}, {agreed}",
        "model": f"{recording.model_name} with {len(tensors)} parameters and buffers",
        "names, order and shapes of parameters and buffers": digest[:16],
        "the recorded forward": fingerprint(recording.graph).hash[:16],
    }


def _plan(given: PlanFile | None, fit: Fit) -> tuple[PlanFile, Lowered | None]:
    """The plan, decided by rank 0, and what that has made of it."""
    chosen: list[Lowered] = []

    def decide() -> PlanFile:
        begin("choosing a plan")
        chosen.append(choose(fit.request, fit.record, fit.cluster, tell))
        plan, prediction = chosen[0].plan, chosen[0].prediction
        assert prediction is not None
        fit.check(prediction.peak_bytes, plan.mesh, rough=True)
        return PlanFile(plan, prediction)

    file = given if given is not None else from_rank_0(decide)
    return file, chosen[0] if chosen else None


def _lowered(
    file: PlanFile, chosen: Lowered | None, forward: Readings
) -> tuple[Lowered, BatchRecording]:
    """The plan, applied on every rank to the recording that belongs to it."""
    plan, prediction = file.decisions, file.prediction
    recording = forward.in_parts(plan.micro_batches, plan.dp)
    # On other dp ranks the numbers of the whole batch are others.
    known = plan.dp == forward.asked.likely_dp
    lowered = chosen if chosen and known else apply_plan(plan, recording)
    if prediction is not None:
        lowered = replace(lowered, gains=prediction.overlap_gains)
    return with_parts(lowered, partial(forward.in_parts, dp=plan.dp)), recording
