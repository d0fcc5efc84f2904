"""One step of each loss formula in one layout, on forked ranks, against one process.

All formulas of a chunk run in one set of ranks. Where one is refused, crashes or hangs, its ranks
are given up, and new ones go on behind it.
"""

from __future__ import annotations

import contextlib
import pickle
import signal
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import torch.distributed as dist

import merakc
from benchmarks.layouts import worst_difference
from benchmarks.loss_formulas import FORMULAS
from benchmarks.loss_formulas.formula import SAMPLES, build, samples_between, whole_batch
from benchmarks.ranks import RankError, RankTimeoutError, run_ranks
from merakc.equality.compare import Reference, Tensors
from merakc.errors import MerakError, MismatchError
from merakc.ir.program import Mesh
from merakc.machines.cluster import NOMINAL_CPU

BOUND = 1e-10
# The formulas in one set of ranks: few enough for progress to be seen, enough for starts not to.
CHUNK = 40
GRACE_S = 0.5  # for the other ranks to write down why they failed as well


class Verdict(StrEnum):
    """What became of a formula in a layout."""

    EQUAL = "equal"
    REFUSED = "refused"
    WRONG = "wrong"
    CRASH = "crash"


@dataclass(frozen=True, slots=True)
class Layout:
    """The ranks, the micro-batches of each dp rank, and how many samples each dp rank has."""

    name: str
    mesh: Mesh
    micro_batches: int
    samples: tuple[int, ...] = (SAMPLES,)


ALONE = Layout("one micro-batch", Mesh(), 1)


@dataclass(frozen=True, slots=True)
class Record:
    """What one rank has to say of a formula: its loss and, on rank 0, gradients, or a failure."""

    loss: float = 0.0
    gradients: Tensors = field(default_factory=dict)
    failure: Verdict | None = None
    reason: str = ""
    second_hand: bool = False  # it failed because another rank did
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Cell:
    """A formula in a layout: the verdict, and the reason of any but `EQUAL`."""

    formula: str
    family: str
    layout: str
    verdict: Verdict
    reason: str = ""
    seconds: float = 0.0


def run_layout(
    layout: Layout, names: Sequence[str], limit_s: float
) -> Iterator[tuple[str, list[Record]]]:
    """Each formula with what the ranks said of it; a rank that said nothing has no record."""
    pending = list(names)
    while pending:
        logs = _run_chunk(layout, pending[:CHUNK], limit_s)
        for k, name in enumerate(pending[:CHUNK]):
            records = [log[k] for log in logs if len(log) > k]
            del pending[0]
            yield name, records
            if len(records) < len(logs) or any(record.failure for record in records):
                break


def _run_chunk(layout: Layout, names: list[str], limit_s: float) -> list[list[Record]]:
    """The records of each rank, up to the first formula that failed."""
    with tempfile.TemporaryDirectory(prefix="merakc-losses-") as text:
        folder = Path(text)
        size = layout.mesh.world_size
        with contextlib.suppress(RankError, RankTimeoutError):  # the records say why and where
            run_ranks(size, run_cells, layout, names, folder, limit_s, timeout_s=limit_s * CHUNK)
        return [_read(folder / str(rank)) for rank in range(size)]


def _read(path: Path) -> list[Record]:
    records: list[Record] = []
    if path.exists():
        with path.open("rb") as file:
            while file.peek(1):
                records.append(pickle.load(file))
    return records


def run_cells(layout: Layout, names: list[str], folder: Path, limit_s: float) -> None:
    """One rank's part of a chunk; collective. A step longer than `limit_s` ends the process."""
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    for name in names:
        signal.setitimer(signal.ITIMER_REAL, limit_s)
        record = run_cell(layout, name)
        with (folder / str(dist.get_rank())).open("ab") as file:
            pickle.dump(record, file)
        if record.failure:
            time.sleep(GRACE_S if dist.get_world_size() > 1 else 0)
            raise RuntimeError(record.reason)
        dist.barrier()
    signal.setitimer(signal.ITIMER_REAL, 0)


def run_cell(layout: Layout, name: str) -> Record:
    """One step of a formula on one rank; collective."""
    formula, mesh = FORMULAS[name], layout.mesh
    start_s = time.perf_counter()
    dp_rank = mesh.coordinates(dist.get_rank())[0]
    first = sum(layout.samples[:dp_rank])
    batch = samples_between(whole_batch(formula), first, first + layout.samples[dp_rank])
    place = ""
    try:
        model = merakc.auto_parallel(
            build(formula), batch, dp=mesh.dp, tp=mesh.tp, pp=mesh.pp,
            micro_batches=layout.micro_batches, cluster=NOMINAL_CPU,
        )  # fmt: skip
        place = "only at the step: "
        loss = model(**batch)["loss"]
        loss.backward()
        record = Record(loss.item(), model.full_gradients())
    except MerakError as error:
        reason = f"{place}{type(error).__name__}: {error}"
        second_hand = isinstance(error, MismatchError)
        record = Record(failure=Verdict.REFUSED, reason=reason, second_hand=second_hand)
    except Exception as error:
        reason = f"{place}{type(error).__name__}: {error}{_place(error)}"
        record = Record(failure=Verdict.CRASH, reason=reason)
    seconds = time.perf_counter() - start_s
    return Record(
        record.loss, record.gradients, record.failure, record.reason, record.second_hand, seconds
    )


def _place(error: Exception) -> str:
    """The line that raised it."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return f" ({trace.tb_frame.f_code.co_filename}:{trace.tb_lineno})" if trace else ""


def reference(name: str) -> Record:
    """The plain model on the whole batch, in this process."""
    formula = FORMULAS[name]
    model = build(formula)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loss = model(**whole_batch(formula))["loss"]
        loss.backward()
    return Record(
        loss.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    )


def references(names: Sequence[str], limit_s: float) -> dict[str, Record]:
    """What one process gives: torch's, or where it draws random numbers, merakc's for the whole
    batch at once, since the two draw from other generators.
    """
    drawn = [name for name in names if FORMULAS[name].draws]
    found = {name: reference(name) for name in names if name not in drawn}
    for name, records in run_layout(ALONE, drawn, limit_s):
        found[name] = records[0] if records else _silent(limit_s)
    return found


def judge(name: str, layout: Layout, records: list[Record], wanted: Record, limit_s: float) -> Cell:
    """The cell of what the ranks said."""
    seconds = max((record.seconds for record in records), default=0.0)
    failure = _failure(records, layout.mesh.world_size, limit_s)
    if failure is None and wanted.failure is not None:
        failure = Record(failure=Verdict.CRASH, reason=f"nothing to compare with: {wanted.reason}")
    verdict, reason = Verdict.EQUAL, ""
    if failure is not None and failure.failure is not None:
        verdict, reason = failure.failure, failure.reason
    else:
        ours, plain = (_compared(record) for record in (records[0], wanted))
        worst = worst_difference(ours, [(record.loss,) for record in records], plain, BOUND)
        if not worst.error <= BOUND:
            what = worst.name.replace(" of step 0", "")
            verdict, reason = Verdict.WRONG, f"{what} is off by {worst.error:.1e}"
    return Cell(name, FORMULAS[name].family, layout.name, verdict, reason, seconds)


def _failure(records: list[Record], ranks: int, limit_s: float) -> Record | None:
    """Why there is nothing to compare, by the rank that knows best."""
    failed = [record for record in records if record.failure]
    if failed:
        return min(failed, key=lambda r: (r.failure is not Verdict.CRASH, r.second_hand))
    return _silent(limit_s) if len(records) < ranks else None


def _silent(limit_s: float) -> Record:
    reason = f"a rank died, or did not end its step in {limit_s:.0f} s"
    return Record(failure=Verdict.CRASH, reason=reason)


def _compared(record: Record) -> Reference:
    return Reference((record.loss,), (record.gradients,), {}, {})


def warm_up() -> None:
    """Does lazy imports in this process, so that its forked ranks need not."""
    name = "mse"
    batch = whole_batch(FORMULAS[name])
    model = merakc.auto_parallel(build(FORMULAS[name]), batch, micro_batches=2, cluster=NOMINAL_CPU)
    model(**batch)["loss"].backward()
