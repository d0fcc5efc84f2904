"""What users ask of `auto_parallel`, checked before their model is looked at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from merakc.batches.dims import check_batch_dims, hypotheses
from merakc.batches.objects import check_objects
from merakc.batches.split import (
    TensorSpecs,
    batch_size_of,
    call_arguments,
    named_tensors,
    shown_dims,
    tensor_specs,
)
from merakc.errors import ConfigError
from merakc.files.printable import count_of
from merakc.frontend.python.plain_tensors import check_batch
from merakc.ir.batches import PER_MICRO_BATCH, WHOLE_BATCH, BatchDims
from merakc.ir.offload import parse_offload
from merakc.ir.plan import Plan
from merakc.ir.plan_checks import check_recompute
from merakc.ir.plan_file import PlanFile, load_plan
from merakc.ir.recompute import parse_budget
from merakc.ir.state import check_shards, parse_shards
from merakc.lowering.find_samples import MOST_TRIED
from merakc.planner.request import Request, check_request, meshes, micro_batches_for, with_schedule
from merakc.planner.search import ALWAYS_RECOMPUTES

# A plan, with what is known of it or without, or its file.
GivenPlan = Plan | PlanFile | str | Path


@dataclass(frozen=True)
class Requested:
    """What was asked for: the plan that is given, and the request, for each way to read the batch,
    likeliest first.

    Where the likeliest does not divide into the parts asked for, it is there in as many as it does,
    and `undivided` is what to raise where it is found to hold; so no other dim is taken because its
    size happens to divide.
    """

    file: PlanFile | None
    readings: list[Request]
    specs: TensorSpecs
    undivided: ConfigError | None = None

    @property
    def plan(self) -> Plan | None:
        """The decisions of the plan that is given."""
        return None if self.file is None else self.file.decisions

    @property
    def likely_dp(self) -> int:
        """The plan's degree, or the most that can be."""
        return self.plan.dp if self.plan else max(m.dp for m in meshes(self.readings[0]))


def requested(
    fixed: Request, plan: GivenPlan | None, batch: Any, *, whole: bool = False
) -> Requested:
    """Checks what users ask for; the batch is a dp rank's, or the `whole` job's.

    Everything that can be refused before the model is looked at is refused here.
    """
    fixed = _checked(fixed)
    file = load_plan(plan) if isinstance(plan, (str, Path)) else plan
    file = PlanFile(file) if isinstance(file, Plan) else file
    args, kwargs = call_arguments(batch)
    check_objects((args, kwargs))
    check_batch(named_tensors(args, kwargs))
    specs = tensor_specs(args, kwargs)
    _check_samples(args, kwargs, fixed.batch_dims)
    check_batch_dims(args, kwargs, fixed.batch_dims)
    if file is not None:
        given = file.decisions
        _check_plan(fixed, given)
        size = batch_size_of(args, kwargs, given.batch_dims)
        request = replace(
            fixed, batch_size=size, total_batch_size=size if whole else fixed.total_batch_size,
            precision=given.precision, couplings=given.couplings, batch_dims=given.batch_dims,
        )  # fmt: skip
        return Requested(file, [request], specs)
    readings: list[Request] = []
    refusal: ConfigError | None = None
    for dims in (fixed.batch_dims, *hypotheses(args, kwargs, fixed.batch_dims)):
        size = batch_size_of(args, kwargs, dims)
        total = size if whole else fixed.total_batch_size
        request = replace(fixed, batch_size=size, batch_dims=dims, total_batch_size=total)
        try:
            if whole:
                check_request(request, size)
            first_parts(request, None)
        except ConfigError as error:
            if refusal is None and not readings:
                refusal, likeliest = error, replace(request, micro_batches=_fewest_parts(size))
        else:
            readings.append(request)
        if len(readings) > MOST_TRIED:
            break
    if refusal is None:
        return Requested(None, readings, specs)
    if not readings:
        raise refusal
    return Requested(None, [likeliest, *readings], specs, refusal)


def _checked(fixed: Request) -> Request:
    """What is fixed, understood. Raises `ConfigError` for what is none of its kind."""
    fixed = replace(fixed, recompute=str(fixed.recompute), offload=str(fixed.offload))
    check_recompute(fixed.recompute)
    check_shards(fixed.state_shards)
    parse_offload(fixed.offload)
    total = fixed.total_batch_size
    if total is not None:
        if type(total) is not int:
            raise ConfigError(f"batch_size is {total!r}; give the number of samples of a step")
        check_request(fixed, total)
    if fixed.couplings not in (WHOLE_BATCH, PER_MICRO_BATCH):
        raise ConfigError(
            f'couplings is {fixed.couplings!r}; give "{WHOLE_BATCH}" or "{PER_MICRO_BATCH}"'
        )
    if fixed.overlap is not None and fixed.overlap < 0:
        raise ConfigError(f"overlap is {fixed.overlap}; give the number of parts, or 0 for none")
    return with_schedule(fixed)


def _check_samples(args: Sequence[Any], kwargs: Mapping[str, Any], dims: BatchDims) -> None:
    """Raises `ConfigError` where a batch has no samples."""
    if batch_size_of(args, kwargs, dims) == 0:
        shapes = {name: list(tensor.shape) for name, tensor in named_tensors(args, kwargs).items()}
        raise ConfigError(
            f"the batch holds no samples: its tensors are of shapes {shapes}; give auto_parallel "
            "one of the size that steps are trained on"
        )


def _fewest_parts(size: int) -> int:
    """The least number of parts, but one, into which so many samples divide."""
    return next((n for n in range(2, size) if size % n == 0), size)


def first_parts(request: Request, given: Plan | None) -> int:
    """The number of micro-batches to record first."""
    if given is not None:
        return given.micro_batches
    return micro_batches_for(request, meshes(request)[0])


def _check_plan(request: Request, given: Plan) -> None:
    """Raises `ConfigError` where what is fixed contradicts the plan."""
    asked = dict(request.fixed)
    shards = asked.pop("state_shards", None)
    if request.couplings != WHOLE_BATCH:
        asked["couplings"] = request.couplings
    if parse_budget(request.recompute) is not None:
        asked["recompute"] = "budget"
    moved = parse_offload(given.offload).kinds
    if moved and all(map(parse_offload(request.offload).may, moved)):
        asked["offload"] = given.offload
    for name, value in asked.items():
        planned = getattr(given, name)
        if value != planned:
            raise ConfigError(
                f"{name}={value} contradicts the plan's {name}={planned}; give one of the two"
            )
    if request.local_batch_size(given.dp) is None:
        raise ConfigError(
            f"a batch of {count_of(request.total_batch_size or 0, 'sample')} does not divide over "
            f"the plan's dp={given.dp}; give a multiple of it, or make a new plan"
        )
    if not request.batch_dims.items() <= given.batch_dims.items():
        raise ConfigError(
            f"batch_dims={shown_dims(request.batch_dims)} contradicts the plan's "
            f"{shown_dims(given.batch_dims)}; give one of the two"
        )
    planned_parts = (*given.sub_batches, *given.row_chunks.values()) or (0,)
    if request.overlap is not None and request.overlap not in planned_parts:
        raise ConfigError(
            f"overlap={request.overlap} contradicts the plan's sub_batches={given.sub_batches}; "
            "give one of the two"
        )
    stages = len(given.rank_of)
    planned_shards = [given.shards(s) for s in range(stages)]
    parsed = (
        parse_shards(shards, given.state_ranks, stages) if shards is not None else planned_shards
    )
    if [one.counts for one in parsed] != [one.counts for one in planned_shards]:
        raise ConfigError(
            f"state_shards={shards} contradicts the plan's state_shards="
            f"{'; '.join(map(str, planned_shards))}; give one of the two"
        )
    if given.mesh.world_size != request.world_size:
        raise ConfigError(
            f"the plan is for {count_of(given.mesh.world_size, 'rank')} "
            f"({' x '.join(given.degrees.split())}), {request.world_size} were started; start as "
            "many, or make a new plan"
        )


def for_forward(
    request: Request, given: Plan | None, checkpoints: bool, *, outside: bool
) -> Request:
    """The request for what the forward turns out to be: with a loss that is made outside there is
    no data parallelism, and what checkpoints recomputes.
    """
    request = _without_dp(request, given) if outside else request
    by_order = request.schedule in ALWAYS_RECOMPUTES or request.order
    if request.recompute == "auto" and given is None and checkpoints and not by_order:
        return replace(request, recompute="full")
    return request


def _without_dp(request: Request, given: Plan | None) -> Request:
    """The request for a loss that is made outside: of each rank's own outputs, in Python."""
    dp = request.dp if given is None else given.dp
    if dp is not None and dp > 1:
        raise ConfigError(
            f"the forward returns no loss for this batch, and dp={dp}: a loss that is made of the "
            "outputs outside, in Python, would know one data-parallel rank's samples only; give "
            "auto_parallel loss=fn, fn(outputs, batch), or the batch its labels; give every rank "
            "the whole job's batch (whole_batches=True); or train with dp=1"
        )
    return replace(request, dp=1)
