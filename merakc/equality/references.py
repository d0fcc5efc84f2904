"""What one process trains a plan is compared with: the plain model, on the whole batch.

What a plan names as a convention is the reference's too: its batch norms normalise each
micro-batch by itself, and where it was asked for, samples are coupled with those of their
micro-batch alone. Where a model draws random numbers, which torch and merakc draw differently, the
one process runs merakc.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from merakc.batches.split import batch_size_of, call_arguments
from merakc.equality.compare import Reference
from merakc.equality.train import Case, comparable, train_in_one_process, train_on_rank
from merakc.ir.batches import PER_MICRO_BATCH, BatchLayout, Rows
from merakc.ir.graph import OutputKind
from merakc.ir.plan import Plan
from merakc.ir.program import Mesh
from merakc.ir.strategy import Strategy
from merakc.lowering.lowered import make_plan
from merakc.lowering.recording import record_part
from merakc.machines.cluster import NOMINAL_CPU
from merakc.passes.batches.analyse import Analysis
from merakc.passes.batches.own_rules import BATCH_NORM
from merakc.passes.batches.part import loss_terms
from merakc.passes.batches.recorded import BatchRecording
from merakc.passes.batches.states import Kind
from merakc.passes.sharding.key_draws import has_draws

PLAIN = "the plain model in one process"


@dataclass(frozen=True)
class Yardstick:
    """How one process trains, and `what` it is in words.

    With `alone`, a plan of one rank, it runs merakc by that. Otherwise it runs the plain model, its
    losses averaged over `parts` equal parts of the batch, or on the batch at once, where `norms`,
    its batch norms by name, normalise each micro-batch by itself. `buffers` says whether those can
    be compared.
    """

    what: str
    alone: Plan | None = None
    parts: int = 1
    norms: Mapping[str, Rows] = field(default_factory=dict)
    buffers: bool = True

    def train(self, case: Case) -> Reference:
        """The training of a case; on a rank of its own."""
        if self.alone is not None:
            return train_on_rank(replace(case, plan=self.alone))
        return train_in_one_process(case, self.norms, self.parts)


def yardstick(case: Case) -> Yardstick:
    """What a case is compared with."""
    parts = case.plan.dp * case.plan.micro_batches
    recording = _recorded(case, parts)
    found = recording.found if parts > 1 else None
    norms = _norms(found) if found is not None else {}
    terms = _coupled_terms(recording, found) if found is not None else ()
    own = parts if norms or terms else 1  # the parts that the reference sees
    why = f", as the plan says: {_some(case.plan.conventions)}" if own > 1 else ""
    if isinstance(recording, BatchRecording) and recording.scaled:
        return _alone(case, own, f"its products are of float8{why}")
    if has_draws(recording.graph):
        return _alone(case, own, f"the model draws numbers{why}")
    mixed = Kind.SUM in terms  # averages of parts are not what these are
    if mixed or not all(isinstance(case.model.get_submodule(n), _BatchNorm) for n in norms):
        return _alone(case, own, f"part of it is of each micro-batch by itself{why}")
    if terms:
        return Yardstick(f"{PLAIN}, micro-batch by micro-batch, averaged{why}", parts=parts)
    if norms:
        what = f"{PLAIN}, on the whole batch, its batch norms over each micro-batch{why}"
        return Yardstick(what, norms=norms)
    return Yardstick(f"{PLAIN}, on the whole batch")


def _norms(found: Analysis) -> dict[str, Rows]:
    """The modules that normalise each part by itself, with where the samples stand."""
    return {
        node.module: rows
        for node in found.part.nodes
        if node.op == BATCH_NORM and found.outcomes[node.name].assumed
        and (rows := found.states[node.args[0]].rows) is not None
    }  # fmt: skip


def _coupled_terms(recording: BatchRecording, found: Analysis) -> set[Kind]:
    """The kinds of the terms of a loss that couples, where each part counts by itself."""
    loss = next(o.ref for o in recording.graph.outputs if o.kind is OutputKind.LOSS)
    if recording.couplings != PER_MICRO_BATCH or found.states[loss].kind is not Kind.COUPLED:
        return set()
    return {found.states[term].kind for term in loss_terms(found, loss)}


def _some(lines: tuple[str, ...]) -> str:
    """The first of them, and how many more there are."""
    return "; ".join(lines[:1]) + (f"; and {len(lines) - 1} more" if len(lines) > 1 else "")


def _alone(case: Case, parts: int, why: str) -> Yardstick:
    """A plan of one rank, for so many micro-batches."""
    samples = case.plan.batch_size * case.plan.dp
    made = make_plan(
        _recorded(case, parts),
        Strategy().on(Mesh(), micro_batches=parts, batch_size=samples),
        NOMINAL_CPU,
    )
    plan = replace(made.plan, precision=case.plan.precision)
    how = f"in {parts} micro-batches" if parts > 1 else "on the whole batch"
    compared = parts == 1 or case.plan.dp == 1  # its dp ranks write buffers by themselves
    what = f"one process of merakc, {how} ({why}){'' if compared else '; buffers are left out'}"
    return Yardstick(what, plan, buffers=compared)


def _recorded(case: Case, parts: int) -> BatchRecording:
    """The forward of one of so many parts of a batch."""
    args, kwargs = call_arguments(case.batches[0])
    layout = BatchLayout((batch_size_of(args, kwargs),), parts)
    with comparable(lift=case.lift):
        return record_part(
            case.model, args, kwargs, layout, torch.device("cpu"), case.plan.precision,
            couplings=case.plan.couplings,
        )  # fmt: skip
