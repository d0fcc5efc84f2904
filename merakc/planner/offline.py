"""Plans made without ranks: for so many of them, and so many samples over all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from merakc.batches.split import batch_size_of, call_arguments
from merakc.costs import state
from merakc.costs.ranks import fits
from merakc.costs.work.scaled import SAMPLES
from merakc.errors import ConfigError, MerakError
from merakc.frontend.record import Recording
from merakc.ir.alternatives import Alternative, Alternatives, Refusal
from merakc.ir.batches import BatchLayout
from merakc.ir.graph import InputKind, dtype_name
from merakc.ir.plan import Plan
from merakc.ir.plan_checks import check_recompute
from merakc.ir.state import AUTO
from merakc.lowering.lowered import Lowered
from merakc.lowering.recording import record_part, with_loss
from merakc.machines.cluster import Cluster
from merakc.machines.garbage import few_collections
from merakc.planner.candidates import RUNNERS_UP, Candidate, Candidates, find_candidates, loses_by
from merakc.planner.piece_table import PieceTable
from merakc.planner.search import Request, improve, search
from merakc.planner.sources import Source

# The best candidates are planned in full, as many as have so many nodes in all, and two at least.
FINALIST_NODES = 9_000
MOST_FINALISTS = 8
# Candidates that are slower than the best by more than that are not planned. Estimates by pieces
# fall short by up to 14 % where stages are few.
FAR = 1.15

Progress = Callable[[str], None]


@dataclass
class Recordings:
    """The forward of a source's model for any number of samples, each recorded once."""

    source: Source
    request: Request
    progress: Progress
    known: dict[int, Recording] = field(default_factory=dict)

    def __call__(self, samples: int) -> Recording:
        """The recording of a micro-batch of so many samples."""
        if samples not in self.known:
            self.progress(f"recording {self.source.name} with {samples} samples")
            args, kwargs = call_arguments(self.source.batch(samples))
            dims = self.source.dims
            assert batch_size_of(args, kwargs, dims) == samples, "a source gives as many as asked"
            cpu = torch.device("cpu")
            precision = self.request.precision
            layout = BatchLayout((samples, samples), 1)  # in parts, whatever their number
            found = record_part(
                self.source.model, args, kwargs, layout, cpu, precision,
                couplings=self.request.couplings, dims=dims,
            )  # fmt: skip
            self.known[samples] = with_loss(found)
        return self.known[samples]

    def part(self, samples: int, parts: int) -> Recording:
        """The recording of one of so many equal parts of so many samples."""
        return self(samples // parts)

    @property
    def dtype(self) -> str:
        """The name of the dtype that most parameters are computed with."""
        graph = self(SAMPLES[0]).graph
        sizes: Counter[str] = Counter()
        for item in graph.inputs:
            if item.kind is InputKind.PARAMETER:
                sizes[dtype_name(item.spec.dtype)] += item.spec.numel
        return max(sizes, key=lambda name: sizes[name])

    @property
    def tokens_per_sample(self) -> int:
        """The elements of a sample's largest integer tensor; 1 where it has none."""
        batch = [i.spec for i in self(SAMPLES[0]).graph.inputs if i.kind is InputKind.BATCH]
        whole = [spec.numel // SAMPLES[0] for spec in batch if not spec.dtype.is_floating_point]
        return max(whole, default=1)


@few_collections()
def plan_offline(
    source: Source,
    request: Request,
    batch_size: int,
    cluster: Cluster,
    progress: Progress = lambda _: None,
) -> tuple[Plan, Lowered, Alternatives]:
    """The plan with the shortest step for `batch_size` samples over all ranks, and the others.

    `request.batch_size` is left to be found. Layouts are compared by their pieces, the best of them
    planned in full. `progress` is told what is being done. Raises `ConfigError` where no degree
    divides the batch, and the first error where nothing can be planned.
    """
    record = Recordings(source, request, progress)
    candidates = compare(record, request, batch_size, cluster)
    nodes = len(record(SAMPLES[0]).graph.nodes)
    finalists = _distinct(candidates.found, min(max(2, FINALIST_NODES // nodes), MOST_FINALISTS))
    best: tuple[Plan, Lowered] | None = None
    first_error: MerakError | None = None
    for candidate in finalists:
        progress(f"planning {describe(candidate)}")
        asked = asked_for(request, candidate, batch_size)
        try:
            found = search(asked, partial(record.part, asked.batch_size), cluster)
        except MerakError as error:
            first_error = first_error or error
            continue
        if best is None or _rank(found[0], cluster) < _rank(best[0], cluster):
            best = found
    if best is None:
        assert first_error is not None
        raise first_error
    progress("improving the best plan")
    local = best[0].batch_size
    asked = replace(request, batch_size=local)
    plan, lowered = improve(asked, *best, partial(record.part, local), cluster)
    return plan, lowered, alternatives(candidates, plan)


def alternatives(candidates: Candidates, chosen: Plan) -> Alternatives:
    """The best of the others by degrees and schedule, what loses them the comparison, and what was
    refused. They are compared with the candidate that was chosen.
    """
    own = min(candidates.found, key=lambda c: _unlike(c, chosen))
    others: dict[object, Alternative] = {}
    for one in candidates.found:
        d = one.layout.degrees
        found = Alternative(
            d.dp, d.tp, d.pp, d.micro_batches, d.schedule, one.habits.recompute,
            str(one.habits.shards), one.estimate.step_s, one.peak_bytes,
            loses_by(one, own), one.layout.sequence_parallel, d.chunks,
        )  # fmt: skip
        if _shown(one) != _shown(own):
            others.setdefault(_shown(one), found)
    refusals = tuple(
        Refusal(
            f"dp={dp} tp={tp} pp={pp}" if dp else f"tp={tp}", why,
            "devices of more memory, or more tp or pp" if dp else "another degree of tp",
        )
        for (dp, tp, pp), why in candidates.refused.items()
    )  # fmt: skip
    best = tuple(others.values())[:RUNNERS_UP]
    return Alternatives(best, refusals[:RUNNERS_UP], own.estimate.step_s)


def _unlike(candidate: Candidate, plan: Plan) -> tuple[bool, ...]:
    """In what a candidate is another than the plan, the weightiest first."""
    d = candidate.layout.degrees
    pairs = (
        ((d.dp, d.tp, d.pp), (plan.dp, plan.tp, plan.pp)),
        (d.micro_batches, plan.micro_batches),
        (candidate.layout.sequence_parallel, plan.sequence_parallel),
        (d.chunks * d.pp, len(plan.rank_of)),
        (d.schedule, plan.schedule),
        (d.inner, plan.inner),
    )
    return tuple(theirs != own for theirs, own in pairs)


def _shown(candidate: Candidate) -> tuple[object, ...]:
    """What people are told of a candidate: all but which axis lies inside, and its shards."""
    habits = candidate.habits
    return describe(candidate), candidate.layout.sequence_parallel, habits.recompute


def compare(record: Recordings, request: Request, batch_size: int, cluster: Cluster) -> Candidates:
    """The candidates for `batch_size` samples over all ranks. Raises as `plan_offline` does."""
    check_request(request, batch_size)
    table = PieceTable(record, cluster)
    hardware = cluster.described(request.world_size)
    precision = state_precision(record(SAMPLES[0]), request)
    return find_candidates(table, request, batch_size, hardware, precision, record.progress)


def check_request(request: Request, batch_size: int) -> None:
    """Raises `ConfigError` where what is fixed divides neither ranks nor batch, or is not known."""
    check_recompute(request.recompute)
    dp, tp, pp = request.dp, request.tp, request.pp
    world, micro_batches = request.world_size, request.micro_batches or 1
    fixed = [f"{k}={v}" for k, v in (("dp", dp), ("tp", tp), ("pp", pp)) if v is not None]
    rest, left = divmod(world, (tp or 1) * (pp or 1))
    if left or (dp and rest % dp) or (len(fixed) == 3 and dp != rest):
        raise ConfigError(
            f"{' x '.join(fixed)} does not multiply to {world} ranks; give degrees whose product "
            "is the number of ranks, or divides it and leaves one open"
        )
    open_dp = [d for d in range(1, rest + 1) if rest % d == 0]
    possible = [dp] if dp else [rest] if tp and pp else open_dp
    if all(batch_size % (d * micro_batches) for d in possible):
        over = f"dp={possible[0]}" if len(possible) == 1 else "any dp"
        each = f" and into {micro_batches} micro-batches" if micro_batches > 1 else ""
        raise ConfigError(
            f"a batch of {batch_size} samples does not divide over {over} of {world} ranks{each}; "
            f"give a multiple of {possible[0] * micro_batches}, or other degrees"
        )


def state_precision(recording: Recording, request: Request) -> state.Precision:
    """The bytes of a parameter's state: of the precision, or of the parameters' own dtype."""
    own = request.precision
    if own is not None:
        compute, gradients, master = (
            own.dtype(of).itemsize for of in ("compute", "gradients", "master")
        )
        return state.Precision(compute, gradients, 3 * master)
    sizes = [i.spec.dtype.itemsize for i in recording.graph.inputs if i.kind is InputKind.PARAMETER]
    size = max(sizes, default=4)
    return state.Precision(size, size, 2 * size)


def asked_for(request: Request, candidate: Candidate, batch_size: int) -> Request:
    """The request, with everything fixed that a candidate has decided."""
    d, habits = candidate.layout.degrees, candidate.habits
    is_open = request.schedule == "auto"
    shards, asked = habits.shards, request.state_shards
    found = shards.parameters, shards.gradients, shards.optimizer
    return replace(
        request,
        batch_size=batch_size // d.dp,
        dp=d.dp,
        tp=d.tp,
        pp=d.pp,
        inner=d.inner,
        micro_batches=d.micro_batches,
        schedule=d.schedule if is_open else request.schedule,
        chunks=d.chunks if d.chunks > 1 else None,
        overlap=0 if request.overlap is None else request.overlap,
        sequence_parallel=candidate.layout.sequence_parallel,
        state_shards=found if asked in (None, AUTO) else asked,
    )


def describe(candidate: Candidate) -> str:
    """A candidate's layout, in a line."""
    d = candidate.layout.degrees
    chunks = f" of {d.chunks} stages a rank" if d.chunks > 1 else ""
    parts = [f"dp={d.dp} tp={d.tp} pp={d.pp}", f"{d.micro_batches} micro-batches"]
    if d.pp > 1:
        parts.append(f"{d.schedule}{chunks}")
    return ", ".join(parts)


def _distinct(found: list[Candidate], count: int) -> list[Candidate]:
    """The best candidates that are not far off, of each layout the better axis inside."""
    limit_s = FAR * found[0].estimate.step_s
    first: dict[object, Candidate] = {}
    for one in found:
        if one.estimate.step_s <= limit_s:
            degrees = replace(one.layout.degrees, inner="pp")
            first.setdefault(replace(one.layout, degrees=degrees), one)
    return list(first.values())[:count]


def _rank(plan: Plan, cluster: Cluster) -> tuple[bool, float]:
    """Plans that fit come first, and then the faster ones."""
    assert plan.prediction is not None
    too_big = not fits(plan.prediction.peak_bytes, cluster, plan.mesh)
    return too_big, plan.prediction.step_s
