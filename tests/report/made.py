"""Plans, lowered, and their reports, for the tests of reports: made once each."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from benchmarks.models import MODELS
from merakc.frontend.record import Recording
from merakc.ir.batches import BatchLayout
from merakc.ir.plan_file import PlanFile
from merakc.ir.precision import parse_precision
from merakc.ir.program import Mesh
from merakc.ir.report import Report
from merakc.ir.state import StateShards
from merakc.ir.strategy import Strategy
from merakc.lowering.lowered import Lowered, make_plan
from merakc.lowering.predict import predict
from merakc.machines.cluster import NOMINAL_CPU, Cluster
from merakc.machines.cluster_files import preset
from merakc.report.analysis import make_report
from tests.coupled_models import TOWERS
from tests.coupled_steps import planned
from tests.recorded import one_of_several

MICRO_BATCHES, SAMPLES = 4, 2  # a micro-batch has so many
SLOW = replace(NOMINAL_CPU, op_overhead_s=0.0, link_latency_s=0.0, link_bytes_per_s=1e6)
H100 = replace(preset("h100").flat(), link_latency_s=1e-5)
# Where computing takes most of the time, as pictures show best.
BUSY = replace(SLOW, flops_per_s=1e8, bytes_per_s=1e8, link_bytes_per_s=1e9)
ALL_AXES = Mesh(2, 2, 2)


@cache
def recording() -> Recording:
    case = MODELS["gpt2"]
    return one_of_several(case.model(), case.batch(SAMPLES))


@cache
def lowered(
    mesh: Mesh = ALL_AXES,
    schedule: str = "1f1b",
    recompute: str = "none",
    shards: tuple[int, int, int] = (1, 1, 1),
    precision: str | None = None,
    cluster: Cluster = SLOW,
    sequence_parallel: bool = False,
) -> Lowered:
    """A plan for four micro-batches of a small GPT-2, with its prediction."""
    found = make_plan(
        recording(),
        Strategy().on(
            mesh,
            micro_batches=MICRO_BATCHES,
            batch_size=MICRO_BATCHES * SAMPLES,
            schedule=schedule,
            recompute=recompute,
            sequence_parallel=sequence_parallel,
        ),
        cluster,
    )
    plan = found.plan
    state = (StateShards(*shards),) * len(plan.rank_of) if max(shards) > 1 else ()
    plan = replace(plan, state_shards=state, precision=parse_precision(precision))
    found = replace(found, plan=plan)
    prediction, _ = predict(found, cluster, dp_rank=0)
    return replace(found, prediction=prediction)


@cache
def coupled(mesh: Mesh = Mesh(dp=2, pp=2)) -> Lowered:  # noqa: B008 - a value
    """A plan for a loss that couples samples, with its prediction."""
    found, _ = planned(TOWERS, mesh, BatchLayout((SAMPLES * MICRO_BATCHES,) * mesh.dp, 4), {})
    prediction, _ = predict(found, SLOW, dp_rank=0)
    size = SAMPLES * MICRO_BATCHES
    return replace(found, plan=replace(found.plan, batch_size=size), prediction=prediction)


_reports: dict[tuple[int, Cluster], tuple[Lowered, Report]] = {}


def report(found: Lowered | None = None, cluster: Cluster = SLOW) -> Report:
    found = found or lowered()
    key = id(found), cluster  # a plan has no hash of its own
    if key not in _reports:
        _reports[key] = found, make_report(found, cluster)
    return _reports[key][1]


def plan_with_report(name: str = "gpt2") -> PlanFile:
    made = lowered()
    return PlanFile(replace(made.plan, model=name), made.prediction, report=report(cluster=BUSY))
