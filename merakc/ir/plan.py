"""The Plan: every decision, in one readable file, keyed by the user's own names."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pydantic

from merakc.errors import MerakError, PlanError
from merakc.files.reading import parse_json, read_text
from merakc.files.writing import write_atomically
from merakc.ir.batches import WHOLE_BATCH, Couplings, Rows
from merakc.ir.plan_checks import check_values, first_unlike
from merakc.ir.precision import Precision
from merakc.ir.program import Inner, Mesh
from merakc.ir.report import Report
from merakc.ir.state import UNSHARDED, StateShards
from merakc.machines.cluster import Cluster, Sharing
from merakc.machines.cluster_files import check_hardware

SCHEMA_VERSION = 5
REMEDY = "give the file of a plan as merakc wrote it, or make the plan again"


@dataclass(frozen=True, slots=True)
class GraphId:
    """The hash of a graph, and of each module's part of it, in program order."""

    hash: str
    modules: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class StageRun:
    """A run of consecutive nodes of the graph that one stage executes."""

    stage: int
    first_node: str
    last_node: str
    first_module: str
    last_module: str


@dataclass(frozen=True, slots=True)
class CutReport:
    """How the stages were found: what METIS proposed, what refinement made of it, the bound.

    Loads are the largest stage's share of the work times the number of stages: 1.0 is even. Where
    the stages' devices differ it is the largest share of the work over the share of the speed.
    """

    winner: str
    load: float
    bound_load: float
    cut_bytes: int
    metis_load: float
    metis_cut_bytes: int
    metis_moves: int


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the simulator expects of one step; `peak_bytes` and `exposed_s` per pipeline rank.

    The latter are the seconds that a rank waits for collectives over dp.
    """

    step_s: float
    bubble_share: float
    peak_bytes: tuple[int, ...]
    exposed_s: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Measured:
    """What ranks measured for a prediction; `where` says of which plan and on which machines.

    `seconds` are of the computes of a micro-batch in a step, by stage and kind, and none of a stage
    that does not run on zeros. `link` is the latency and the bytes a second of a step of a
    collective, `messages` are those between stages. `sharing` are the cores of ranks on a CPU.
    `around_s` is what a step does before and after its Program: counting labels, and giving the
    loss to all ranks.
    """

    where: str
    seconds: tuple[dict[str, float], ...]
    link: tuple[float, float]
    messages: tuple[float, float] | None = None
    sharing: Sharing | None = None
    around_s: float = 0.0


@dataclass(frozen=True, slots=True)
class OpaqueModule:
    """A module that runs as it is, whole on one stage and on every tp rank.

    `source` is the line of it that could not be recorded and `reason` why; `flops_share` is its
    part of the forward's arithmetic, as a trial run counted it.
    """

    name: str
    source: str
    reason: str
    flops_share: float


@dataclass(frozen=True, slots=True)
class CoupledLoss:
    """Why micro-batches wait for the whole batch: its loss couples the samples, behind a stage.

    `source` is the line that does and `why` how; it reads `waist_bytes` of the whole batch.
    """

    stage: int
    source: str
    why: str
    waist_bytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """A way to train one model on one number of ranks.

    `splits` holds the layout (`merakc.ir.layout`) of each parameter and buffer that is split over
    tp; `parameters` the stages that hold each parameter. `collectives` counts the tp collectives
    of one micro-batch, forward and backward. `whole_ops` names the ops, with their source lines,
    that each tp rank computes whole because there is no rule to split them, `head` tells of a loss
    that couples samples: with those of the whole batch, or by `couplings` of their micro-batch.
    `conventions` names what is of each micro-batch by convention, with its lines. `batch_dims` says
    where the samples of the batch's tensors stand, by name or pattern, where sizes do not. With
    `sequence_parallel`, what tp leaves whole runs on parts of sequences. `state_shards` are those
    of parameters, gradients and optimizer state over dp, stage by stage; empty, none is sharded.
    Without a `precision` the model computes in its own dtypes.

    `placement` holds the pipeline rank of each stage; without it, each rank has one. `order` holds
    the order of work of each pipeline rank, where the name of the schedule does not say it. `inner`
    is the axis of ranks that are closer, after those of tp. `keep_bytes` is what a micro-batch may
    keep on each stage from its forward to its backward where `recompute` is "solved"; at -1 it
    keeps all. `sub_batches` is the number of parts in which each stage runs a micro-batch, one's
    communication under the others' arithmetic; without it, collectives block. `row_chunks` holds
    the numbers of chunks of rows, by the names of their weights, in which products beside
    collectives are computed where a micro-batch runs whole; `fused_products` names the weights
    whose products are one op with the collective beside them instead. `overlap_gains` is the share
    of its seconds that each is expected to save so, on `machines`, whose figures decide the order
    of its nodes. `report` is what `merakc show` tells beside the decisions. What is `measured` is
    not measured again where the plan is run on machines like those.
    """

    model: str
    dp: int
    tp: int
    pp: int
    batch_size: int
    micro_batches: int
    schedule: str
    recompute: str
    graph: GraphId
    stages: tuple[StageRun, ...]
    parameters: dict[str, tuple[int, ...]]
    splits: dict[str, str]
    collectives: dict[str, int]
    cut: CutReport
    whole_ops: tuple[str, ...] = ()
    opaque_modules: tuple[OpaqueModule, ...] = ()
    head: CoupledLoss | None = None
    couplings: Couplings = WHOLE_BATCH
    conventions: tuple[str, ...] = ()
    batch_dims: dict[str, Rows | None] = dataclasses.field(default_factory=dict)
    sequence_parallel: bool = False
    state_shards: tuple[StateShards, ...] = ()
    precision: Precision | None = None
    placement: tuple[int, ...] = ()
    order: tuple[str, ...] = ()
    keep_bytes: tuple[int, ...] = ()
    inner: Inner = "pp"
    sub_batches: tuple[int, ...] = ()
    row_chunks: dict[str, int] = dataclasses.field(default_factory=dict)
    fused_products: tuple[str, ...] = ()
    overlap_gains: tuple[float, ...] = ()
    machines: Cluster | None = None
    prediction: Prediction | None = None
    measured: Measured | None = None
    report: Report | None = None
    merakc_version: str = ""
    schema_version: int = SCHEMA_VERSION

    @property
    def mesh(self) -> Mesh:
        """The grid of ranks."""
        return Mesh(self.dp, self.tp, self.pp, self.inner)

    @property
    def rank_of(self) -> tuple[int, ...]:
        """The pipeline rank of each stage."""
        return self.placement or tuple(range(self.pp))

    def shards(self, stage: int) -> StateShards:
        """How the state of a stage is sharded over dp."""
        return self.state_shards[stage] if self.state_shards else UNSHARDED

    def tied_shards(self, stage: int) -> dict[str, StateShards]:
        """How the parameters are sharded that a stage shares with one before it: as there."""
        return {
            name: self.shards(stages[0])
            for name, stages in self.parameters.items()
            if stage in stages and stages[0] != stage
        }

    @property
    def hash(self) -> str:
        """SHA-256 of the contents but for what is no decision: prediction, report and figures."""
        bare = dataclasses.replace(self, prediction=None, measured=None, report=None)
        body = dataclasses.asdict(bare)
        del body["measured"]  # plans that have never had it keep their hash
        for name in ("head", "batch_dims"):
            if not body[name]:
                del body[name]
        return _digest(body)

    def save(self, path: str | Path) -> None:
        """Writes the plan as JSON, with its hash and that of all that is in the file: whole, or not
        at all.
        """
        write_atomically(path, file_text(self.hash, dataclasses.asdict(self)))


def file_text(plan_hash: str, body: dict[str, Any]) -> str:
    """What stands in the file of a plan of that hash and those contents."""
    return json.dumps({"hash": plan_hash, "file_hash": _digest(body), **body}, indent=1) + "\n"


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def load_plan(path: str | Path) -> Plan:
    """Reads a plan; checks its schema, its hash, and that its values go together.

    Raises `PlanError` where the file is no plan, of another schema, was edited or cannot be.
    """
    try:
        text = read_text(path)
    except (OSError, ValueError) as error:
        raise PlanError(f"{path}: not a readable plan file ({error}); {REMEDY}") from error
    return parse_plan(text, str(path))


def parse_plan(text: str, where: str = "plan") -> Plan:
    """The plan that the text of a file holds; `where` stands in messages.

    Raises `PlanError` as `load_plan` does.
    """
    try:
        body = parse_json(text)
    except ValueError as error:
        raise PlanError(f"{where}: not a readable plan file ({error}); {REMEDY}") from error
    if not isinstance(body, dict):
        raise PlanError(f"{where}: not a plan file, the top level is no JSON object; {REMEDY}")
    version = body.get("schema_version")
    if version != SCHEMA_VERSION:
        raise PlanError(
            f"{where}: schema version {version}, this merakc reads {SCHEMA_VERSION}; "
            "make the plan again"
        )
    stated, whole = body.pop("hash", None), body.pop("file_hash", None)
    try:
        plan = _ADAPTER.validate_python(body)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        more = f" ({error.error_count() - 1} more)" if error.error_count() > 1 else ""
        raise PlanError(
            f"{where}: not a valid plan: {place}: {first['msg']}{more}; make the plan again"
        ) from error
    except MerakError as error:
        raise PlanError(f"{where}: not a valid plan: {error}") from error
    _check(plan, body, stated, whole, where)
    return plan


def _check(plan: Plan, body: dict[str, Any], stated: object, whole: object, where: str) -> None:
    """Raises `PlanError` where the plan is not what was written, or cannot be."""
    if plan.hash != stated:
        raise PlanError(
            f"{where}: the contents hash to {plan.hash[:12]} but the file says "
            f"{str(stated)[:12]}: it was edited after it was written; make the plan again"
        )
    if _digest(body) != whole:
        raise PlanError(
            f"{where}: its prediction or its report was edited after it was written; make the "
            "plan again"
        )
    values = dataclasses.asdict(plan)
    if unlike := first_unlike(body, values):
        raise PlanError(f"{where}: not a valid plan: {unlike}, or make the plan again")
    try:
        check_values(values)
        if plan.machines and plan.machines.hardware:
            check_hardware(plan.machines.hardware, "machines.hardware")
    except MerakError as error:
        raise PlanError(f"{where}: not a valid plan: {error}") from error


_ADAPTER = pydantic.TypeAdapter(Plan)
