"""The file of a plan: its decisions, and beside them what is known of what they cost."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pydantic

from merakc.errors import MerakError, PlanError
from merakc.files.reading import parse_json, read_text
from merakc.files.writing import write_atomically
from merakc.ir.plan import Plan, digest
from merakc.ir.plan_checks import check_values, first_unlike
from merakc.ir.report import Report
from merakc.machines.cluster import Sharing
from merakc.machines.cluster_files import check_hardware
from merakc.version import __version__

SCHEMA_VERSION = 16
REMEDY = "give the file of a plan as merakc wrote it, or make the plan again"


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the simulator expects of one step; `peak_bytes` and `exposed_s` per pipeline rank.

    `step_s` is all of a call: the simulated Program, which is the `step_s` of a `Simulation`, and
    what ranks have measured of the step around it (`Measured.around_s`), nothing before they have.
    `exposed_s` are the seconds that a rank waits for collectives over dp. `overlap_gains` is the
    share of its seconds that each stage saves by tp communication under computation. `host_s` are,
    per pipeline rank, the seconds in which the host updates, and what it has updated comes back:
    none of them is in `step_s`, as the optimizer's are not; `host_left_s` what
    is left of them where `merakc.step_in_backward` was called. `host_bytes` are,
    per pipeline rank, the most of its micro-batches' values that waits there; empty, none does.
    """

    step_s: float
    bubble_share: float
    peak_bytes: tuple[int, ...]
    exposed_s: tuple[float, ...] = ()
    overlap_gains: tuple[float, ...] = ()
    host_s: tuple[float, ...] = ()
    host_left_s: tuple[float, ...] = ()
    host_bytes: tuple[int, ...] = ()


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
class PlanFile:
    """What stands in the file of a plan, of which the hash covers the decisions.

    `report` is what `merakc show` tells beside them. What is `measured` is not measured again where
    the plan is run on machines like those. `merakc_version` is that which made the file.
    """

    decisions: Plan
    prediction: Prediction | None = None
    measured: Measured | None = None
    report: Report | None = None
    merakc_version: str = __version__

    @property
    def hash(self) -> str:
        """That of the decisions."""
        return self.decisions.hash

    @property
    def text(self) -> str:
        """The file: JSON, with the hash of the decisions and that of all that is in it."""
        return file_text(self.hash, dataclasses.asdict(self))

    def save(self, path: str | Path) -> None:
        """Writes the file: whole, or not at all."""
        write_atomically(path, self.text)


def file_text(plan_hash: str, body: dict[str, Any]) -> str:
    """What stands in the file of a plan of that hash and those contents."""
    head = {"schema_version": SCHEMA_VERSION, "hash": plan_hash, "file_hash": digest(body)}
    return json.dumps({**head, **body}, indent=1) + "\n"


def load_plan(path: str | Path) -> PlanFile:
    """Reads the file of a plan; checks its schema, its hash, and that its values go together.

    Raises `PlanError` where the file is no plan, of another schema, was edited or cannot be.
    """
    try:
        text = read_text(path)
    except OSError as error:
        raise PlanError(f"{path}: cannot be read ({error.strerror}); {REMEDY}") from error
    except ValueError as error:
        raise PlanError(f"{path}: not a readable plan file ({error}); {REMEDY}") from error
    return parse_plan(text, str(path))


def parse_plan(text: str, where: str = "plan") -> PlanFile:
    """What the text of a plan's file says; `where` stands in messages.

    Raises `PlanError` as `load_plan` does.
    """
    try:
        body = parse_json(text)
    except ValueError as error:
        raise PlanError(f"{where}: not a readable plan file ({error}); {REMEDY}") from error
    if not isinstance(body, dict):
        raise PlanError(f"{where}: not a plan file, the top level is no JSON object; {REMEDY}")
    version = body.pop("schema_version", None)
    if version is None:
        raise PlanError(f"{where}: not a plan file, it states no schema version; {REMEDY}")
    if version != SCHEMA_VERSION:
        raise PlanError(
            f"{where}: schema version {version}, this merakc reads {SCHEMA_VERSION}; "
            "make the plan again"
        )
    stated, whole = body.pop("hash", None), body.pop("file_hash", None)
    try:
        found = _ADAPTER.validate_python(body)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        more = f" ({error.error_count() - 1} more)" if error.error_count() > 1 else ""
        raise PlanError(
            f"{where}: not a valid plan: {place}: {first['msg']}{more}; make the plan again"
        ) from error
    except MerakError as error:
        raise PlanError(f"{where}: not a valid plan: {error}") from error
    _check(found, body, stated, whole, where)
    return found


def _check(
    found: PlanFile, body: dict[str, Any], stated: object, whole: object, where: str
) -> None:
    """Raises `PlanError` where the plan is not what was written, or cannot be."""
    if found.hash != stated:
        raise PlanError(
            f"{where}: the contents hash to {found.hash[:12]} but the file says "
            f"{str(stated)[:12]}: it was edited after it was written; make the plan again"
        )
    if digest(body) != whole:
        raise PlanError(
            f"{where}: its prediction or its report was edited after it was written; make the "
            "plan again"
        )
    values = dataclasses.asdict(found)
    if unlike := first_unlike(body, values):
        raise PlanError(f"{where}: not a valid plan: {unlike}, or make the plan again")
    try:
        check_values(values)
        machines = found.decisions.machines
        if machines and machines.hardware:
            check_hardware(machines.hardware, "machines.hardware")
    except MerakError as error:
        raise PlanError(f"{where}: not a valid plan: {error}") from error


_ADAPTER = pydantic.TypeAdapter(PlanFile)
