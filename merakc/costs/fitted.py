"""Factors of the cost model from the ledgers of runs: what steps took, against the formulas."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from merakc.errors import CalibrationError
from merakc.files.printable import count_of
from merakc.ir.ledger import Header, Ledger, StepLine
from merakc.ir.program import ActionKind
from merakc.machines.cluster import Factors

FORWARD = (ActionKind.FORWARD, ActionKind.RECOMPUTE)
BACKWARD = (ActionKind.BACKWARD, ActionKind.INPUT_GRAD, ActionKind.WEIGHT_GRAD)
# No machine is so many times faster or slower than its figures say.
FAR = 1e6
# A backward ends with one of these, once for a micro-batch.
ENDS = (ActionKind.BACKWARD, ActionKind.WEIGHT_GRAD)


@dataclass(frozen=True, slots=True)
class Fit:
    """How one factor was found: seconds of a step that formulas say and that were measured, added
    up over the ledgers, and the factor before and after. Nothing was measured where they are 0.
    """

    kind: str
    modelled_s: float
    measured_s: float
    before: float
    after: float


def fit_factors(
    ledgers: Sequence[Ledger], steps: Sequence[Sequence[StepLine]]
) -> tuple[Factors, list[Fit]]:
    """The factors that make the formulas right on average, and how each was found.

    `steps[k]` are those of ledger k that count. Each ledger has the same weight: its factor is the
    measured over the modelled seconds of its median step, and what comes out their geometric mean.
    Factors that nothing was measured of stay. Raises `CalibrationError` where the ledgers are of
    different hardware, or tell of nothing.
    """
    first = ledgers[0].header.hardware
    for ledger in ledgers[1:]:
        if ledger.header.hardware != first:
            raise CalibrationError(
                f"{ledger.where}: was run on, or predicted for, other hardware than "
                f"{ledgers[0].where}; give ledgers of one cluster file"
            )
    fits = []
    for kind in ("forward", "backward", "collectives", "optimizer"):
        pairs = [
            _seconds(kind, ledger.header, own) for ledger, own in zip(ledgers, steps, strict=True)
        ]
        known = [pair for pair in pairs if min(pair) > 0]
        _check(kind, known)
        before: float = getattr(first.factors, kind)
        logs = [math.log(measured / modelled) for modelled, measured in known]
        after = before * math.exp(statistics.fmean(logs)) if logs else before
        sums = [sum(column) for column in zip(*known, strict=True)] or [0.0, 0.0]
        fits.append(Fit(kind, sums[0], sums[1], before, after))
    if not any(fit.measured_s for fit in fits):
        raise CalibrationError(
            f"{ledgers[0].where}: its steps tell of no compute; give that of a run that trains"
        )
    counts = sum(map(len, steps))
    told = count_of(counts, "measured step"), count_of(len(ledgers), "run")
    source = f"{told[0]} of {told[1]}: merakc calibrate --from"
    by_kind = {fit.kind: fit.after for fit in fits}
    found = Factors(
        by_kind["forward"],
        by_kind["backward"],
        by_kind["collectives"],
        by_kind["optimizer"],
        source,
    )
    return found, fits


def _check(kind: str, pairs: Sequence[tuple[float, float]]) -> None:
    """Raises `CalibrationError` for seconds that have nothing to do with each other."""
    for modelled, measured in pairs:
        if not 1 / FAR < measured / modelled < FAR:
            raise CalibrationError(
                f"{kind}: {measured:.3g} s were measured and {modelled:.3g} s expected; give the "
                "ledger of a run on this hardware"
            )


def _seconds(kind: str, header: Header, steps: Sequence[StepLine]) -> tuple[float, float]:
    """Modelled and measured seconds of one kind in a step; 0 where there are none."""
    found = [list(_stage_seconds(kind, header, step)) for step in steps]
    if kind == "optimizer":
        updates = [step.optimizer_s for step in steps if step.optimizer_s is not None]
        return header.optimizer_s, statistics.median(updates) if updates else 0.0
    modelled = statistics.median(sum(m for m, _ in own) for own in found)
    return modelled, statistics.median(sum(m for _, m in own) for own in found)


def _stage_seconds(kind: str, header: Header, step: StepLine) -> Iterator[tuple[float, float]]:
    """Of each stage and kind of compute; what ranks lose to each other is none of the formulas'."""
    of_stage = {own.stage: own for own in header.modelled}
    for own in step.spent:
        action, model = ActionKind(own.kind), of_stage.get(own.stage)
        if model is None:
            raise CalibrationError(
                f"step {step.step}: tells of stage {own.stage}, and the header of stages "
                f"{sorted(of_stage)}; give the ledger as the run wrote it"
            )
        alone_s = own.computed_s / header.stretch
        match kind:
            case "forward" if action in FORWARD:
                yield own.count * model.forward_s, alone_s
            case "backward" if action in BACKWARD:
                yield own.count * model.backward_s * (action in ENDS), alone_s
            case "collectives" if action.is_compute:
                yield own.count * model.wire_s * (action in ENDS), own.waited_s
