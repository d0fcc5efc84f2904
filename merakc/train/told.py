"""What users are told of a plan before it runs: what is done otherwise than they may expect."""

from __future__ import annotations

import sys
import warnings

from merakc.errors import MerakWarning
from merakc.frontend.regions import WHY as DYNAMIC
from merakc.frontend.source import INSTALLED, near_line
from merakc.ir.batches import PER_MICRO_BATCH
from merakc.ir.plan import Plan
from merakc.passes.batches.recorded import BatchRecording

# The share of the forward's arithmetic from which on it matters that a part runs as it is.
WORTH_TELLING = 0.01


def warn_of(plan: Plan, recording: BatchRecording, *, outside: bool = False) -> None:
    """Warns of modules that run as they are, of what steps leave out, of conventions that were
    asked for, and of a plan that was made before the loss was known, which is made `outside`.
    """
    if outside:
        warnings.warn(
            f"the forward of {recording.model_name} returns no loss for this batch: the plan is "
            "made for the mean of its outputs, and the loss is what calls loss.backward()"
            "; auto_parallel(model, batch, loss=fn) plans with it, and trains at any dp",
            MerakWarning,
            stacklevel=4,
        )
    _warn_of_opaque(plan)
    _warn_of_unheard(recording)
    if plan.couplings == PER_MICRO_BATCH:
        for line in plan.conventions:
            warnings.warn(f"by convention: {line}", MerakWarning, stacklevel=4)


def warn_of_shapes(many: int, most: int) -> None:
    """Says, of the user's own line, that a model has been compiled for many shapes."""
    _warn_of_line(
        f"merakc has compiled this model for {many} shapes of batch, numbers in them, modes or "
        f"attributes, and keeps {most}; pad batches to fewer"
    )


def warn_of_same() -> None:
    """Says, of the user's own line, that all dp ranks train on the same samples."""
    _warn_of_line(
        "all data-parallel ranks were given the same batches in several steps: they train on the "
        "same samples, as one of them would; merakc.dataloader(data, model, batch_size) deals them "
        "out, and model.read_whole_batches() takes each rank's part of a batch that all read"
    )


def _warn_of_line(text: str) -> None:
    name, _, line = near_line(sys._getframe(2)).rpartition(":")
    warnings.warn_explicit(text, MerakWarning, name or "merakc", int(line or 0))


def _warn_of_opaque(plan: Plan) -> None:
    """Says once for each module what runs as it is, where that is more than a sum over a mask."""
    for module in plan.opaque_modules:
        where = f"module '{module.name}'" if module.name else "the model's own forward"
        if module.reason == DYNAMIC:
            where = f"a part of {where}"
            if module.flops_share < WORTH_TELLING:
                continue
        warnings.warn(
            f"{where} cannot be recorded and runs as it is, whole on one stage and "
            f"on each of {plan.tp} tp ranks: {module.reason}, at {module.source}. It is "
            f"{module.flops_share:.0%} of the forward's arithmetic, and its forward runs again in "
            "the backward",
            MerakWarning,
            stacklevel=4,
        )


def _warn_of_unheard(recording: BatchRecording) -> None:
    """Says what steps do not do that code of the user's own does beside computing."""
    for told in recording.aside.unheard:
        if not told.rpartition(", at ")[2].startswith(INSTALLED):
            warnings.warn(told, MerakWarning, stacklevel=4)
