"""`python -m benchmarks.measured_cells`: small models under small plans, predicted and really run.

Every cell is a stock model on 2 or 4 processes of this machine. `auto_parallel` predicts its step
when it starts: it simulates the plan with the seconds that the computes take in a few trials on
its batch, and with those of messages and collectives apart; then it trains. Here trials and steps
of training take turns, since the machine is faster in one minute than in the next, and the
prediction is the one that `auto_parallel` would make of these trials. A step is all that
`model(**batch)` and `backward()` do. The peak of a rank counts every storage that is alive, but for
gradients that may be on their way to be scattered, as in `benchmarks.memory`.

Beside it stands what the cost model says of the same plan from the cluster file of this machine
(`merakc calibrate`), without a look at the model's own kernels.

CLIP's contrastive loss couples all samples: its micro-batches wait for each other at the loss. The
price of that is the step over one in which each micro-batch is a batch of its own; the two take
turns, too.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table

import merakc
from benchmarks.harness import DocPath, JsonPath, finish, markdown, rich_table
from benchmarks.measured_models import MODELS, make_batch
from benchmarks.memory import on_the_way, peak_error, step_peak
from benchmarks.ranks import run_ranks
from benchmarks.reports import told_run
from merakc.cli.calibration import calibrate
from merakc.lowering.predict import predict
from merakc.machines.cluster import Hardware
from merakc.machines.cluster_files import load_cluster
from merakc.train.expectations.expected import expected, stage_seconds
from merakc.train.expectations.trials import Seconds, trial, values_of
from merakc.train.starting import machines_for

STEP_BOUND, MEDIAN_BOUND, MEMORY_BOUND, CHOICE_BOUND, PRICE_BOUND = 0.10, 0.05, 0.05, 0.05, 0.05
BATCH, MICRO_BATCHES = 16, 4
WARM_UP = 3
MOST_RANKS = 4
PIPELINE = {"pp": 2, "schedule": "1f1b", "recompute": "none"}
# By name: the options of `auto_parallel`. All plans of a model train the same batch.
PLANS: Mapping[str, dict[str, Any]] = {
    "pp 2, 1f1b": PIPELINE,
    "pp 2, zb-h1": {**PIPELINE, "schedule": "zb-h1"},
    "pp 2, 1f1b, recomputed": {**PIPELINE, "recompute": "stage"},
    "tp 2": {"tp": 2, "recompute": "none"},
    "dp 2": {"dp": 2, "recompute": "none"},
    "dp 2 x pp 2, 1f1b": {**PIPELINE, "dp": 2},
    "tp 2 x pp 2, 1f1b": {**PIPELINE, "tp": 2},
}
LEFT_OUT = {
    "gpt2": "pp 2, 1f1b, recomputed",
    "llama": "pp 2, 1f1b",
    "bert": "pp 2, 1f1b, recomputed",
    "t5": "pp 2, 1f1b",
}
# The same without waiting for the whole batch, which trains another loss where one couples samples.
UNCOUPLED = {f"{name}, uncoupled": name for name in ("pp 2, 1f1b", "dp 2")}
CELLS = tuple((m, p) for m in LEFT_OUT for p in PLANS if p != LEFT_OUT[m]) + tuple(
    ("clip", plan) for pair in UNCOUPLED.items() for plan in reversed(pair)
)


def options_of(plan: str) -> dict[str, Any]:
    """Of `auto_parallel`."""
    couplings = {"couplings": "per micro-batch"} if plan in UNCOUPLED else {}
    return {"dp": 1, "tp": 1, "pp": 1, **PLANS[UNCOUPLED.get(plan, plan)], **couplings}


@dataclass(frozen=True, slots=True)
class Ran:
    """What one rank tells of a cell; `modelled_s` is that of the cluster file's formulas."""

    predicted_s: float
    modelled_s: float
    runs_s: tuple[float, ...]
    predicted_bytes: int
    measured_bytes: int
    on_the_way_bytes: int


@dataclass(frozen=True, slots=True)
class Cell:
    """A model under a plan: its step, the median of the runs, and the peak of each rank."""

    model: str
    plan: str
    ranks: int
    predicted_s: float
    modelled_s: float
    runs_s: tuple[float, ...]
    predicted_bytes: tuple[int, ...]
    measured_bytes: tuple[int, ...]
    on_the_way_bytes: tuple[int, ...]

    @property
    def measured_s(self) -> float:
        """The median."""
        return statistics.median(self.runs_s)

    @property
    def error(self) -> float:
        """Of the predicted step, relative to the measured one."""
        return self.predicted_s / self.measured_s - 1

    @property
    def modelled_error(self) -> float:
        """Of the step by formulas."""
        return self.modelled_s / self.measured_s - 1

    @property
    def memory_error(self) -> float:
        """The largest relative difference of a rank's peak."""
        return peak_error(self.predicted_bytes, self.measured_bytes, self.on_the_way_bytes)


@dataclass(frozen=True, slots=True)
class Choice:
    """The plans of a model on so many ranks: which is predicted best, and what that loses."""

    model: str
    ranks: int
    chosen: str
    best: str
    loss: float


@dataclass(frozen=True, slots=True)
class Price:
    """How much longer a plan's step is for what couples samples, relative to one without."""

    model: str
    plan: str
    predicted: float
    measured: float


def prices(cells: Sequence[Cell]) -> list[Price]:
    """Of each plan that was run both ways."""
    found = {(cell.model, cell.plan): cell for cell in cells}
    return [
        Price(
            model, UNCOUPLED[plan],
            found[model, UNCOUPLED[plan]].predicted_s / cell.predicted_s - 1,
            found[model, UNCOUPLED[plan]].measured_s / cell.measured_s - 1,
        )
        for (model, plan), cell in found.items()
        if plan in UNCOUPLED
    ]  # fmt: skip


def choices(cells: Sequence[Cell]) -> list[Choice]:
    """Of each model and number of ranks with several plans."""
    groups: dict[tuple[str, int], list[Cell]] = {}
    for cell in cells:
        if cell.plan not in UNCOUPLED:
            groups.setdefault((cell.model, cell.ranks), []).append(cell)
    found = []
    for (model, ranks), own in groups.items():
        if len(own) > 1:
            chosen = min(own, key=lambda cell: cell.predicted_s)
            best = min(own, key=lambda cell: cell.measured_s)
            loss = chosen.measured_s / best.measured_s - 1
            found.append(Choice(model, ranks, chosen.plan, best.plan, loss))
    return found


class Training:
    """A model that one rank trains under a plan; collective."""

    def __init__(self, model: str, plan: str) -> None:
        """Seeded: all ranks and plans of a model begin alike."""
        options = options_of(plan)
        torch.manual_seed(0)
        samples, micro_batches = BATCH // options["dp"], MICRO_BATCHES // options["dp"]
        example = make_batch(model, samples, seed=0)
        self.parallel = merakc.auto_parallel(
            MODELS[model](), example, micro_batches=micro_batches, **options
        )
        self.batch = make_batch(model, samples, seed=self.parallel.data_parallel_rank)
        self.optimizer = torch.optim.AdamW(self.parallel.parameters())
        self.machine = self.parallel._own("_steps")
        (self.step,) = self.machine.compiled.values()
        self.brought = values_of(self.machine, self.step, ((), self.batch))
        self.runs_s, self.trials = list[float](), list[Seconds]()

    def turn(self) -> None:
        """A trial of the plan's computes, and a step."""
        self.optimizer.zero_grad()
        self.trials.append(trial(self.machine, self.step, self.brought, alone=False))
        dist.barrier()
        start_s = time.perf_counter()
        self.parallel(**self.batch).loss.backward()
        self.runs_s.append(time.perf_counter() - start_s)
        self.optimizer.step()

    def told(self, hardware: Hardware) -> Ran:
        """What these trials predict, beside what was measured, and the peak."""
        machine, parallel, batch = self.machine, self.parallel, self.batch
        seconds = stage_seconds(machine, self.trials[WARM_UP:])
        measured = replace(machine.file.measured, seconds=seconds)
        machine.file = replace(machine.file, measured=measured)
        step = machine.with_graphs(self.step, (), batch)
        predicted, *_ = expected(machine, step, machines_for(None, machine.device), ((), batch))
        prediction = parallel.plan_file.prediction  # which is of the same bytes
        assert prediction is not None
        place = parallel.plan.mesh.coordinates(parallel.rank)[1]
        modelled, _ = predict(machine.planned, hardware.flat("float32"))
        peak_bytes = step_peak(parallel, self.optimizer, batch)
        return Ran(
            predicted.step_s, modelled.step_s, tuple(self.runs_s[WARM_UP:]),
            prediction.peak_bytes[place], peak_bytes, on_the_way(parallel),
        )  # fmt: skip


def run_cells(model: str, plans: Sequence[str], steps: int, hardware: Hardware) -> list[Ran]:
    """One rank of cells that take turns: the machine is as fast for one as for the other."""
    trainings = [Training(model, plan) for plan in plans]
    for _ in range(WARM_UP + steps):
        for training in trainings:
            training.turn()
    return [training.told(hardware) for training in trainings]


def measure(model: str, plans: Sequence[str], steps: int, hardware: Hardware) -> list[Cell]:
    """Runs cells of as many ranks on processes of their own."""
    sizes = {math.prod(options_of(plan)[axis] for axis in ("dp", "tp", "pp")) for plan in plans}
    (ranks,) = sizes
    every = run_ranks(ranks, run_cells, model, plans, steps, hardware, timeout_s=600.0)
    return [
        Cell(
            model, plan, ranks, predicted_s=found[0].predicted_s, modelled_s=found[0].modelled_s,
            runs_s=tuple(max(each) for each in zip(*(own.runs_s for own in found), strict=True)),
            predicted_bytes=tuple(own.predicted_bytes for own in found),
            measured_bytes=tuple(own.measured_bytes for own in found),
            on_the_way_bytes=tuple(own.on_the_way_bytes for own in found),
        )
        for plan, *found in zip(plans, *every, strict=True)
    ]  # fmt: skip


def together(cells: Sequence[tuple[str, str]]) -> list[tuple[str, tuple[str, ...]]]:
    """Cells that take turns: a plan and the same without what couples samples."""
    runs: dict[tuple[str, str], list[str]] = {}
    for model, plan in cells:
        runs.setdefault((model, UNCOUPLED.get(plan, plan)), []).append(plan)
    return [(model, tuple(plans)) for (model, _), plans in runs.items()]


@dataclass(frozen=True, slots=True)
class Summary:
    """What is asked for, with what was found."""

    cells: tuple[Cell, ...]
    choices: tuple[Choice, ...]
    prices: tuple[Price, ...]

    @property
    def rows(self) -> list[tuple[str, float, float]]:
        """What it is, the worst that was found, and what is allowed."""
        errors = [abs(cell.error) for cell in self.cells]
        losses = [choice.loss for choice in self.choices]
        prices = [abs(price.predicted - price.measured) for price in self.prices]
        return [
            ("step, worst cell", max(errors), STEP_BOUND),
            ("step, median of the cells", statistics.median(errors), MEDIAN_BOUND),
            ("peak memory, worst rank", max(c.memory_error for c in self.cells), MEMORY_BOUND),
            ("loss of the plan predicted best, worst", max(losses, default=0.0), CHOICE_BOUND),
            ("price of what couples samples, worst", max(prices, default=0.0), PRICE_BOUND),
        ]

    @property
    def passed(self) -> bool:
        """Whether all bounds hold."""
        return all(found <= bound for _, found, bound in self.rows)


def cells_rows(cells: Sequence[Cell]) -> list[list[str]]:
    """A row a cell."""
    rows = [["model", "plan", "predicted", "measured", "runs", "error", "formulas", "memory"]]
    for cell in cells:
        good, fits = abs(cell.error) <= STEP_BOUND, cell.memory_error <= MEMORY_BOUND
        rows.append([
            cell.model, cell.plan, f"{cell.predicted_s * 1e3:.1f} ms",
            f"{cell.measured_s * 1e3:.1f} ms",
            f"{min(cell.runs_s) * 1e3:.0f} to {max(cell.runs_s) * 1e3:.0f}",
            f"[{'green' if good else 'red'}]{cell.error:+.1%}[/]", f"{cell.modelled_error:+.0%}",
            f"[{'green' if fits else 'red'}]{cell.memory_error:.1%}[/]",
        ])  # fmt: skip
    return rows


def summary_table(summary: Summary) -> Table:
    """What is asked for, and which plans would have been chosen."""
    rows = [["", "found", "at most"]]
    for name, found, bound in summary.rows:
        colour = "green" if found <= bound else "red"
        rows.append([name, f"[{colour}]{found:.1%}[/]", f"{bound:.0%}"])
    for one in summary.choices:
        text = f"{one.model} on {one.ranks} ranks: predicted best is {one.chosen}"
        rows.append([text, f"{one.loss:+.1%}", ""])
    for price in summary.prices:
        text = f"{price.model}, {price.plan}: coupling costs {price.predicted:+.1%} by prediction"
        rows.append([text, f"{price.measured:+.1%}", ""])
    return rich_table(rows, title="What is asked for")


def document(summary: Summary, arguments: Sequence[str]) -> str:
    """The page of the documentation."""
    asked = [(name, f"{found:.1%}", f"{bound:.0%}") for name, found, bound in summary.rows]
    heads = ("model", "plan", "predicted", "measured", "fastest to slowest run, ms", "error",
             "by formulas", "largest error of a peak")  # fmt: skip
    chosen = [(o.model, str(o.ranks), o.chosen, o.best, f"{o.loss:+.1%}") for o in summary.choices]
    prices = [(p.model, p.plan, f"{p.predicted:+.1%}", f"{p.measured:+.1%}")
              for p in summary.prices]  # fmt: skip
    tables = (
        [("asked for", "found", "at most"), *asked],
        [heads, *cells_rows(summary.cells)[1:]],
        [("model", "ranks", "predicted best", "measured best", "loss"), *chosen],
        [("model", "plan", "price of coupling, predicted", "measured"), *prices],
    )
    told = told_run("benchmarks.measured_cells", arguments)
    about = "\n".join((__doc__ or "").splitlines()[2:])
    title = "# Small cells on this machine, predicted and measured"
    return "\n\n".join([title, told, about, *map(markdown, tables)]) + "\n"


def main(
    models: Annotated[str, typer.Option(help="Comma-separated; all if empty.")] = "",
    steps: Annotated[int, typer.Option(help="Timed steps of a cell.")] = 15,
    cluster: Annotated[
        Path | None, typer.Option(help="This machine's cluster file; measured if not given.")
    ] = None,
    json_path: JsonPath = None,
    doc: DocPath = None,
) -> None:
    """Compares all cells; exits with 1 where a bound is missed."""
    said = Console(stderr=True)
    torch.set_num_threads(1)
    if cluster is None:
        said.print("measuring this machine", style="dim")
    hardware = load_cluster(cluster) if cluster else calibrate(torch.device("cpu"), MOST_RANKS)
    wanted = models.split(",") if models else list(MODELS)
    todo = together([(model, plan) for model, plan in CELLS if model in wanted])
    cells = list[Cell]()
    for k, (model, plans) in enumerate(todo, 1):
        told = "; ".join(plans)
        said.print(f"{k} of {len(todo)}: {model}, {told}", style="dim", highlight=False)
        cells += measure(model, plans, steps, hardware)
    summary = Summary(tuple(cells), tuple(choices(cells)), tuple(prices(cells)))
    console = Console(width=120)
    title = "Steps on this machine, and peaks of ranks"
    console.print(rich_table(cells_rows(cells), left=2, title=title), summary_table(summary))
    body = {"passed": summary.passed, **dataclasses.asdict(summary), "bounds": summary.rows}
    finish(
        console, summary.passed, "", json_path=json_path, figures=body, doc=doc,
        page=lambda: document(summary, sys.argv[1:]),
    )  # fmt: skip


if __name__ == "__main__":
    typer.run(main)
