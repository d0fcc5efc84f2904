"""The ledger of a run: what its steps took, beside what its plan was expected to take.

A file of one JSON object a line. The first is the header, each further one a step. Every line ends
with a digest of itself and of the line before it, so that an edited or missing line is seen.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any, Literal

import pydantic

from merakc.errors import ClusterError, LedgerError
from merakc.files.reading import MOST_BYTES, misread, parse_json, read_text
from merakc.ir.plan_checks import numbers
from merakc.ir.plan_file import Prediction
from merakc.ir.program import ActionKind
from merakc.machines.cluster import Hardware
from merakc.machines.cluster_files import check_hardware

LEDGER_VERSION = 1
DIGEST_LENGTH = 16
MOST_LEDGER_BYTES = 1 << 30  # a million steps


@dataclass(frozen=True, slots=True)
class Spent:
    """What the actions of one stage and kind (`merakc.ir.program.ActionKind`) take in a step.

    `count` is their number on one rank. `seconds` are a rank's in all of them, the mean over the
    ranks that hold the stage, `most_s` those of the slowest. For `waited_s` of the seconds a rank
    stands still: for messages, or for collectives inside the graphs.
    """

    stage: int
    kind: str
    count: int
    seconds: float
    most_s: float
    waited_s: float

    @property
    def computed_s(self) -> float:
        """The seconds without the waiting."""
        return self.seconds - self.waited_s


@dataclass(frozen=True, slots=True)
class Modelled:
    """What the cost model's formulas say of a stage and micro-batch on the header's hardware.

    Seconds of the kernels of a forward and of a backward, and of the collectives inside both.
    """

    stage: int
    forward_s: float
    backward_s: float
    wire_s: float


@dataclass(frozen=True, slots=True)
class Header:
    """The first line: what was run, on what, and what was expected.

    `plan` is the plan's hash. `origin` says whether the prediction was made from kernels that were
    timed when the run began, or modelled from the figures of `hardware`. `expected` is what the
    simulated step spends, `modelled` and `optimizer_s` what formulas say, whatever the origin.
    Computes take `stretch` times as long as on a rank alone, where ranks share cores.
    """

    plan: str
    model: str
    degrees: Mapping[str, int]
    micro_batches: int
    device: str
    versions: Mapping[str, str]
    hardware: Hardware
    origin: Literal["measured", "modelled"]
    prediction: Prediction
    expected: tuple[Spent, ...]
    modelled: tuple[Modelled, ...]
    optimizer_s: float
    stretch: float = 1.0
    ledger_version: int = LEDGER_VERSION


@dataclass(frozen=True, slots=True)
class StepLine:
    """A training step.

    `step_s` is the longest time that a rank took for its actions, `spent` what it consists of.
    `optimizer_s` is the slowest rank's optimizer step before this one; None where there was none.
    `exposed_s` are the seconds that a pipeline rank waits for collectives over dp, `peak_bytes` the
    most that was alive on one; empty where that was not measured. A `counted` step ran slowly, to
    count its bytes: its times mean nothing.
    """

    step: int
    step_s: float
    optimizer_s: float | None
    spent: tuple[Spent, ...]
    exposed_s: tuple[float, ...] = ()
    peak_bytes: tuple[int, ...] = ()
    counted: bool = False


@dataclass(frozen=True, slots=True)
class Ledger:
    """A whole file; `where` is its name in messages."""

    where: str
    header: Header
    steps: tuple[StepLine, ...]


def line_text(line: Header | StepLine, before: str) -> tuple[str, str]:
    """A line of the file, and its digest; `before` is that of the line before, "" of none."""
    body = dataclasses.asdict(line)
    digest = _digest(body, before)
    return json.dumps({**body, "digest": digest}, separators=(",", ":")) + "\n", digest


def read_ledger(path: str | Path) -> Ledger:
    """The ledger in a file.

    Raises `LedgerError`, with the line and a remedy, where it is none, of another version, cut off,
    or was edited.
    """
    try:
        lines = read_text(path, MOST_LEDGER_BYTES).splitlines()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise LedgerError(
            f"{path}: not a readable ledger ({why}); give the file that auto_parallel(ledger=...) "
            "wrote"
        ) from error
    if not lines:
        raise LedgerError(f"{path}: is empty; give the file of a run that took a step")
    found: list[Any] = []
    before = ""
    for number, text in enumerate(lines, 1):
        body, before = _checked(text, before, f"{path}: line {number}", last=number == len(lines))
        found.append(_parsed(body, Header if number == 1 else StepLine, f"{path}: line {number}"))
        _check(found[0], found[-1], f"{path}: line {number}")
    return Ledger(str(path), found[0], tuple(found[1:]))


def _check(header: Header, line: Header | StepLine, where: str) -> None:
    """Raises `LedgerError` for a line that no run writes."""
    ranks = len(header.prediction.peak_bytes)
    wrong = [
        f"{own.count} times {own.kind!r} on stage {own.stage}"
        for own in (line.expected if isinstance(line, Header) else line.spent)
        if own.kind not in tuple(ActionKind) or own.count < 1 or own.stage < 0
    ]
    wrong += [f"{name} is {n}" for name, n in numbers(dataclasses.asdict(line)) if not isfinite(n)]
    if isinstance(line, StepLine):
        own = {"exposed_s": line.exposed_s, "peak_bytes": line.peak_bytes}
        wrong += [f"{k} of {len(v)} ranks" for k, v in own.items() if len(v) not in (0, ranks)]
    elif not line.stretch > 0:
        wrong.append(f"stretch is {line.stretch}")
    if wrong:
        raise LedgerError(f"{where}: {wrong[0]}, which no run writes; run it again")
    if isinstance(line, Header):
        try:
            check_hardware(line.hardware, f"{where}: hardware")
        except ClusterError as error:
            raise LedgerError(str(error)) from error


def _checked(text: str, before: str, where: str, *, last: bool) -> tuple[dict[str, Any], str]:
    """The body of a line that is as it was written, and its digest."""
    try:
        body = parse_json(text) if len(text) <= MOST_BYTES else None
    except ValueError:
        body = None
    if not isinstance(body, dict):
        cut = "the run may have been stopped there; remove that line" if last else "run it again"
        raise LedgerError(f"{where}: is cut off, or no line of a ledger; {cut}")
    stated = body.pop("digest", None)
    digest = _digest(body, before)
    if stated != digest:
        raise LedgerError(
            f"{where}: hashes to {digest} and says {stated}: it, or a line before it, was edited "
            "or removed after it was written; use the ledger as the run wrote it"
        )
    return body, digest


def _parsed(body: dict[str, Any], kind: type[Header | StepLine], where: str) -> Any:
    if kind is Header and body.get("ledger_version") != LEDGER_VERSION:
        raise LedgerError(
            f"{where}: ledger version {body.get('ledger_version')}, this merakc reads "
            f"{LEDGER_VERSION}; run it again, or read it with the merakc that wrote it"
        )
    try:
        found = _ADAPTERS[kind].validate_python(body)
        for wrong in misread(body, dataclasses.asdict(found), "this line"):
            raise LedgerError(f"{where}: {wrong}; run it again")
        return found
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise LedgerError(f"{where}: {place}: {first['msg']}; run it again") from error


def _digest(body: Mapping[str, Any], before: str) -> str:
    text = before + json.dumps(body, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:DIGEST_LENGTH]


_ADAPTERS: dict[type, pydantic.TypeAdapter[Any]] = {
    kind: pydantic.TypeAdapter(kind) for kind in (Header, StepLine)
}
