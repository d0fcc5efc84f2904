"""Plans made without ranks: for so many of them, and so many samples over all of them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import prod

import torch

from merakc.batches.split import batch_size_of
from merakc.files.printable import count_of
from merakc.frontend.python.compared import Compared
from merakc.frontend.record import Recording
from merakc.ir.plan import Plan
from merakc.ir.report import Alternative, Alternatives, Refusal
from merakc.ir.strategy import Strategy
from merakc.lowering.forwards import Shared
from merakc.lowering.lowered import Lowered
from merakc.lowering.recording import record_part, with_loss
from merakc.machines.cluster import Cluster
from merakc.machines.garbage import few_collections
from merakc.planner.candidates import RUNNERS_UP, Candidates
from merakc.planner.choose import Patience, Progress, choose, compare
from merakc.planner.fit import fit_error
from merakc.planner.piece_table import PieceTable
from merakc.planner.pricing import Candidate
from merakc.planner.request import Request, check_request
from merakc.planner.sources.source import Source
from merakc.report.units import format_seconds


@dataclass
class Recordings:
    """The forward of a source's model for any number of samples, each recorded once."""

    source: Source
    request: Request
    progress: Progress
    known: dict[int, Recording] = field(default_factory=dict)
    _shared: Shared = field(default_factory=dict)
    _compared: Compared = field(default_factory=Compared)

    @property
    def _alone(self) -> bool:
        """Whether there is one dp rank, whatever else is decided."""
        asked = self.request
        return asked.dp == 1 or asked.world_size == prod(
            degree or 1 for degree in (asked.tp, asked.pp, asked.cp)
        )

    def __call__(self, samples: int) -> Recording:
        """The recording of a micro-batch of so many samples."""
        if samples not in self.known:
            self.progress(f"recording {self.source.name} with {count_of(samples, 'sample')}")
            args, kwargs, layout = self.source.part(samples, alone=self._alone)
            dims = self.source.dims
            given = batch_size_of(args, kwargs, dims)
            assert given == layout.own, "a source gives as many as asked"
            cpu = torch.device("cpu")
            precision = self.request.precision
            recording = record_part(
                self.source.model, args, kwargs, layout, cpu, precision,
                couplings=self.request.couplings, dims=dims, shared=self._shared,
                compared=self._compared,
            )  # fmt: skip
            self.known[samples] = with_loss(recording)
        return self.known[samples]


def plan_offline(
    source: Source,
    request: Request,
    batch_size: int,
    cluster: Cluster,
    progress: Progress = lambda _: None,
    patience: Patience | None = None,
) -> tuple[Lowered, Alternatives]:
    """The plan with the shortest step for `batch_size` samples over all ranks, and the others.

    `request.batch_size` is left to be found. Layouts are compared by their pieces, the best of them
    planned in full. `progress` is told what is being done; once the `patience` is at its end the
    best so far is taken. Raises `ConfigError` where no degree
    divides the batch, and the first error where nothing can be planned.
    """
    record = Recordings(source, request, progress)
    return plan_recorded(record, request, batch_size, cluster, patience=patience)


@few_collections()
def plan_recorded(
    record: Recordings,
    request: Request,
    batch_size: int,
    cluster: Cluster,
    table: PieceTable | None = None,
    patience: Patience | None = None,
) -> tuple[Lowered, Alternatives]:
    """The same, of a model that was recorded before, and with the pieces that are known of it."""
    check_request(request, batch_size)
    request = replace(request, total_batch_size=batch_size)
    candidates = compare(request, record, cluster, record.progress, table, patience)
    if not candidates.ranked:
        raise fit_error(request, record, cluster, candidates.table)
    lowered = choose(request, record, cluster, record.progress, candidates, patience)
    return lowered, alternatives(candidates, lowered.plan)


def alternatives(candidates: Candidates, chosen: Plan) -> Alternatives:
    """The best of the others by degrees and schedule, what loses them the comparison, and what was
    refused. They are compared with the candidate that was chosen.
    """
    best = min(candidates.ranked, key=lambda c: _unlike(c.strategy, chosen))
    others: dict[object, Alternative] = {}
    for one in candidates.ranked:
        if _shown(one.strategy) != _shown(best.strategy):
            step_s, peak_bytes = one.estimate.step_s, one.peak_bytes
            lost = Alternative(one.strategy, step_s, peak_bytes, loses_by(one, best))
            others.setdefault(_shown(one.strategy), lost)
    refusals = tuple(
        Refusal(
            f"dp={dp} {form.asked} pp={pp}" if dp else form.asked, why,
            "devices of more memory, or more tp or pp" if dp else "another degree",
        )
        for (dp, form, pp), why in candidates.refused.items()
    )  # fmt: skip
    runners_up = tuple(others.values())[:RUNNERS_UP]
    return Alternatives(runners_up, refusals[:RUNNERS_UP], best.estimate.step_s)


def _unlike(candidate: Strategy, plan: Plan) -> tuple[bool, ...]:
    """In what a candidate is another than the plan, the weightiest first."""
    degrees = candidate.degrees != plan.degrees
    names = "micro_batches", "sequence_parallel", "stage_count", "schedule", "inner"
    pairs = ((getattr(candidate, name), getattr(plan, name)) for name in names)
    return degrees, *(theirs != chosen for theirs, chosen in pairs)


def _shown(strategy: Strategy) -> tuple[object, ...]:
    """What people are told of a candidate: all but which axis lies inside, and its shards."""
    return str(strategy), strategy.sequence_parallel, strategy.recompute


def loses_by(one: Candidate, best: Candidate) -> str:
    """What a candidate spends most more on than the best."""
    if one.sample_s < best.sample_s:
        return "planned in full it is slower"
    each = best.strategy.total_batch_size / one.strategy.total_batch_size
    more = {name: each * value - best.seconds[name] for name, value in one.seconds.items()}
    name = max(more, key=lambda key: more[key])
    sign = "+" if more[name] >= 0 else "-"
    return f"{name} {sign}{format_seconds(abs(more[name]))}"
