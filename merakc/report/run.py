"""What a run's steps took beside what its plan expects: the rows of `merakc diff plan run`."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table
from rich.text import Text

from merakc.costs.spent import by_rank, merged
from merakc.errors import LedgerError
from merakc.files.printable import count_of
from merakc.ir.ledger import Ledger, Spent, StepLine
from merakc.ir.plan_file import PlanFile, Prediction
from merakc.ir.program import ActionKind
from merakc.report.packing import unpack
from merakc.report.units import format_bytes, format_seconds

# The first steps warm up: caches, allocators, connections between ranks.
WARM_UP_STEPS = 2
NAMES = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "backward",
    ActionKind.INPUT_GRAD: "input gradients",
    ActionKind.WEIGHT_GRAD: "weight gradients",
    ActionKind.RECOMPUTE: "recomputation",
    ActionKind.HEAD: "coupled loss",
    ActionKind.RECV: "waits for messages",
    ActionKind.REDUCE: "sums of gradients",
}
# A difference of more than that is marked: what a prediction is asked to keep.
FAR = 0.10


@dataclass(frozen=True, slots=True)
class Row:
    """One figure, in `unit` (s or bytes): what was predicted, and the median of what was measured.

    `waited` is the measured part in which ranks stood still for collectives.
    """

    what: str
    unit: str
    predicted: float
    measured: float
    waited: float = 0.0

    @property
    def ratio(self) -> float | None:
        """Measured over predicted; None where nothing was predicted."""
        return self.measured / self.predicted if self.predicted > 0 else None


def compare_run(file: PlanFile, ledger: Ledger, where: str, skip: int = WARM_UP_STEPS) -> list[Row]:
    """The step, each stage, waits, the optimizer and peaks of memory.

    The first `skip` steps are left out, and those whose bytes were counted. `where` is the plan's
    name in messages. Raises `LedgerError` where the ledger is of another plan, or holds no more
    steps than those.
    """
    header = ledger.header
    if header.plan != file.hash:
        raise LedgerError(
            f"{ledger.where}: is of plan {header.plan[:12]} ({header.model}), and {where} is plan "
            f"{file.hash[:12]} ({file.decisions.model}); give the plan that was run: "
            "model.plan_file.save() writes it"
        )
    steps = timed_steps(ledger, skip)
    prediction, expected = _expected(file, ledger)
    seconds = statistics.median(step.step_s for step in steps)
    rows = [Row("step", "s", prediction.step_s, seconds)]
    rows += _spent_rows(expected, steps)
    optimizer_s = [s.optimizer_s for s in steps if s.optimizer_s is not None]
    if optimizer_s:
        rows.append(Row("optimizer", "s", header.optimizer_s, statistics.median(optimizer_s)))
    exposed = [step.exposed_s for step in steps if step.exposed_s]
    rows += _rank_rows("waits for dp", "s", prediction.exposed_s, exposed)
    peaks = [step.peak_bytes for step in ledger.steps if step.peak_bytes]
    rows += _rank_rows("peak memory", "bytes", prediction.peak_bytes, peaks)
    return rows


def timed_steps(ledger: Ledger, skip: int = WARM_UP_STEPS) -> list[StepLine]:
    """The steps whose times count. Raises `LedgerError` where there is none."""
    found = [step for step in ledger.steps[skip:] if not step.counted]
    if not found:
        raise LedgerError(
            f"{ledger.where}: holds {count_of(len(ledger.steps), 'step')}, and the first {skip} "
            "and those whose memory was counted are left out; run more"
        )
    return found


def rows_table(rows: Sequence[Row], title: str) -> Table:
    """The rows for `rich` to print; those that are far off are yellow."""
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    table.add_column("", overflow="fold")
    for name in ("predicted", "measured", "of it waiting", "ratio"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        shown = format_seconds if row.unit == "s" else format_bytes
        waited = f"{row.waited / row.measured:.0%}" if row.waited and row.measured else ""
        ratio = f"{row.ratio:.2f}" if row.ratio is not None else "-"
        is_far = row.ratio is not None and abs(row.ratio - 1) > FAR
        table.add_row(
            row.what, shown(row.predicted), shown(row.measured), waited,
            Text(ratio, "yellow" if is_far else ""),
        )  # fmt: skip
    return table


def _expected(file: PlanFile, ledger: Ledger) -> tuple[Prediction, Sequence[Spent]]:
    """What the plan's file predicts; what the run did when it began, where the file does not."""
    report = file.report
    if file.prediction is None or report is None or report.timeline.left_out_s is not None:
        return file.prediction or ledger.header.prediction, ledger.header.expected
    return file.prediction, merged(by_rank(unpack(report.timeline).events))


def _spent_rows(expected: Iterable[Spent], steps: Sequence[StepLine]) -> Iterator[Row]:
    """A row for each stage and kind: computes of one micro-batch, all else of the step."""
    predicted = {(own.stage, own.kind): own for own in expected}
    measured: dict[tuple[int, str], list[Spent]] = {}
    for step in steps:
        for own in step.spent:
            measured.setdefault((own.stage, own.kind), []).append(own)
    for stage, kind in sorted(predicted.keys() | measured.keys(), key=_place):
        name = NAMES.get(ActionKind(kind))
        if name is None:
            continue
        each = ActionKind(kind).is_compute
        before = _seconds(predicted[stage, kind], each=each) if (stage, kind) in predicted else 0.0
        own_steps = measured.get((stage, kind), [])
        after = _median(_seconds(own, each=each) for own in own_steps)
        waited = _median(own.waited_s / (own.count if each else 1) for own in own_steps)
        if before or after:
            yield Row(f"stage {stage}: {name}", "s", before, after, waited if each else 0.0)


def _place(key: tuple[int, str]) -> tuple[int, int]:
    """The key that sorts computes by stage, and in the order in which a stage does them."""
    stage, kind = key
    order = list(NAMES)
    return stage, order.index(ActionKind(kind)) if kind in order else len(order)


def _seconds(own: Spent, *, each: bool) -> float:
    return own.seconds / own.count if each else own.seconds


def _median(values: Iterable[float]) -> float:
    found = list(values)
    return statistics.median(found) if found else 0.0


def _rank_rows(
    name: str, unit: str, predicted: Sequence[float], measured: Sequence[Sequence[float]]
) -> Iterator[Row]:
    """A row for each pipeline rank, where anything was measured."""
    for rank, own in enumerate(zip(*measured, strict=True)):
        before = predicted[rank] if rank < len(predicted) else 0.0
        after = statistics.median(own)
        if before or after:
            yield Row(f"rank {rank} of the pipeline: {name}", unit, before, after)


def figures(rows: Iterable[Row]) -> list[Mapping[str, object]]:
    """The rows for JSON."""
    return [
        {
            "what": row.what, "unit": row.unit, "predicted": row.predicted,
            "measured": row.measured, "waited": row.waited, "ratio": row.ratio,
        }
        for row in rows
    ]  # fmt: skip
