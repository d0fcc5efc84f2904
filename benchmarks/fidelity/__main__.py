"""`python -m benchmarks.fidelity`: the cost model against published step times and memory.

Of each file of vTrain's rows, at most twenty are fitted: four constants, then corrections of the
blocks that they ran. The rest is predicted. The rows of papers are predicted with the four
constants of each kind of GPU that stand in its cluster file, which `--fit` finds again. Exits with
1 where a limit is missed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.fidelity.data import (
    FILES,
    NODE,
    DataError,
    Row,
    choose_rows,
    published_rows,
    read_rows,
)
from benchmarks.fidelity.fit import constants_of, correct, fit, predict
from benchmarks.harness import JsonPath, finish, rich_table
from merakc.costs.measured import NONE, Corrections
from merakc.machines.cluster import Hardware
from merakc.machines.cluster_files import preset

BESIDE = Path(__file__).resolve().parents[3] / "shared" / "data"
FITTED = 20
# vTrain's nodes are linked with 800 Gb/s (arXiv 2312.12391), half of what a DGX A100 has.
VTRAIN_BYTES_PER_S = 100e9
MEAN_ERROR = {"single node": 0.05, "several nodes": 0.08, "papers": 0.06}
WORST_ERROR = 0.12  # of a paper's row
MEMORY_ERROR = 0.05
MEAN_REGRET, WORST_REGRET = 0.02, 0.15


@dataclass(frozen=True, slots=True)
class Found:
    """A row and what the model says of it. `error` is relative; `fitted` rows are not judged."""

    row: Row
    predicted_s: float
    fitted: bool = False

    @property
    def error(self) -> float:
        """How much too long the prediction is."""
        return self.predicted_s / self.row.step_s - 1


@dataclass(frozen=True, slots=True)
class Check:
    """A figure and its limit."""

    name: str
    value: float
    limit: float

    @property
    def passed(self) -> bool:
        """Whether the limit holds."""
        return self.value <= self.limit


@dataclass(frozen=True, slots=True)
class Learned:
    """Hardware with fitted constants, the corrections, and the rows that they are from."""

    hardware: Hardware
    corrections: Corrections = NONE
    fitted: tuple[Row, ...] = ()

    def find(self, rows: Sequence[Row]) -> list[Found]:
        """What the model says of rows."""
        return [
            Found(r, predict(r, self.hardware, self.corrections).step_s, r in self.fitted)
            for r in rows
        ]


def vtrain_hardware(rows: Sequence[Row]) -> Hardware:
    """The machines that vTrain's rows were measured on: A100s, 800 Gb/s a node."""
    hardware = preset("a100-80", -(-max(r.strategy.world_size for r in rows) // NODE))
    inside, outside = hardware.links
    return replace(hardware, links=(inside, replace(outside, bytes_per_s=VTRAIN_BYTES_PER_S)))


def learn_from(rows: Sequence[Row], count: int) -> Learned:
    """Constants and corrections from at most so many of the rows."""
    fitted = tuple(rows[k] for k in choose_rows(rows, count))
    hardware = fit(fitted, vtrain_hardware(rows))
    return Learned(hardware, correct(fitted, hardware), fitted)


def regrets(found: Sequence[Found]) -> list[float]:
    """How much longer the step that the model ranks first took than the shortest measured one.

    One for each group of two or more rows of equal model, batch and GPUs.
    """
    groups: dict[object, list[Found]] = {}
    for one in found:
        groups.setdefault(one.row.group, []).append(one)
    return [
        min(own, key=lambda f: f.predicted_s).row.step_s / min(f.row.step_s for f in own) - 1
        for own in groups.values()
        if len(own) > 1
    ]


def error_checks(name: str, found: Sequence[Found], mean: float, worst: float = 0.0) -> list[Check]:
    """The checks of rows that were not fitted."""
    errors = np.abs([f.error for f in found if not f.fitted])
    if not len(errors):
        return []
    checks = [Check(f"{name}: mean error of {len(errors)} rows", float(errors.mean()), mean)]
    if worst:
        checks.append(Check(f"{name}: worst error", float(errors.max()), worst))
    return checks


def regret_checks(name: str, found: Sequence[Found]) -> list[Check]:
    """The checks of what the model would choose."""
    own = regrets(found)
    if not own:
        return []
    return [
        Check(f"{name}: mean regret of {len(own)} choices", float(np.mean(own)), MEAN_REGRET),
        Check(f"{name}: worst regret", max(own), WORST_REGRET),
    ]


def memory_errors(rows: Sequence[Row], hardware: Hardware) -> list[tuple[Row, float, float]]:
    """Rows of published activation memory, with the model's bytes and its relative error.

    Of the first pipeline rank, which has the most micro-batches in flight, without recomputation.
    """
    found: list[Found] = []
    for row in rows:
        if row.activation_bytes:
            kept = replace(row, strategy=replace(row.strategy, recompute="none"))
            estimate = predict(kept, hardware)
            state = sum(s.static_bytes for s in estimate.stages[:: row.strategy.pp])
            held = estimate.peak_bytes[0] - state
            found.append((row, held, held / row.activation_bytes - 1))
    return found


def rows_table(title: str, found: Sequence[Found]) -> Table:
    """Every row."""
    rows = [["source", "model, layout, micro-batches", "measured s", "predicted s", "error", ""]]
    rows += [
        [one.row.source, one.row.label, f"{one.row.step_s:.4g}", f"{one.predicted_s:.4g}",
         f"{one.error:+.1%}", "fitted" if one.fitted else ""]
        for one in found
    ]  # fmt: skip
    return rich_table(rows, left=2, title=title, title_justify="left")


def checks_table(checks: Sequence[Check]) -> Table:
    """What was asked and what was found."""
    rows = [["", "found", "at most", ""]]
    rows += [
        [check.name, f"{check.value:.2%}", f"{check.limit:.0%}",
         "passed" if check.passed else "missed"]
        for check in checks
    ]  # fmt: skip
    return rich_table(rows, left=4)


def check_vtrain(
    console: Console, folder: Path, others: Sequence[Path]
) -> tuple[list[Check], list[Found]]:
    """VTrain's files, and other files of their columns with what was learned from them."""
    checks: list[Check] = []
    everything: list[Found] = []
    learned: dict[str, Learned] = {}
    for name, file in zip(("single node", "several nodes"), FILES, strict=False):
        rows = read_rows(folder / file)
        with console.status(f"fitting {FITTED} of {len(rows)} rows: {name}"):
            learned[name] = learn_from(rows, FITTED)
        found = learned[name].find(rows)
        console.print(rows_table(f"vTrain, {name}", found))
        console.print(f"fitted to {FITTED} rows: {constants_of(learned[name].hardware)}")
        checks += error_checks(f"vTrain, {name}", found, MEAN_ERROR[name])
        everything += found
    checks += regret_checks("vTrain", everything)
    for path in others:
        rows = read_rows(path)
        for name in learned:
            own = [r for r in rows if (r.strategy.world_size > NODE) == (name == "several nodes")]
            found = learned[name].find(own)
            everything += found
            if found:
                console.print(rows_table(f"{path.name}, {name}", found))
            checks += error_checks(f"{path.name}, {name}", found, MEAN_ERROR[name])
            checks += regret_checks(f"{path.name}, {name}", found)
    return checks, everything


def check_papers(console: Console, folder: Path, *, refit: bool) -> tuple[list[Check], list[Found]]:
    """The rows of papers with the constants of the cluster files."""
    checks: list[Check] = []
    everything: list[Found] = []
    for kind, rows in published_rows(folder / FILES[2]).items():
        hardware = preset(kind, -(-max(r.strategy.world_size for r in rows) // NODE))
        if refit:
            with console.status(f"fitting {kind}"):
                hardware = fit(rows, hardware)
        found = Learned(hardware).find(rows)
        console.print(rows_table(f"papers, {kind}", found))
        console.print(f"{kind}: {constants_of(hardware)}")
        everything += found
        memory = memory_errors(rows, hardware)
        for row, held, error in memory:
            console.print(
                f"{row.source} {row.name}: activations {held / 2**30:.2f} GiB, published "
                f"{row.activation_bytes / 2**30:.2f} GiB, {error:+.1%}"
            )
        if memory:
            worst = max(abs(error) for *_, error in memory)
            checks.append(Check(f"papers, {kind}: activation memory", worst, MEMORY_ERROR))
    checks += error_checks("papers", everything, MEAN_ERROR["papers"], WORST_ERROR)
    return checks, everything


def main(
    data: Annotated[Path, typer.Option(help="The folder of the published rows.")] = BESIDE,
    rows: Annotated[
        list[Path] | None, typer.Option(help="Also check this CSV of vTrain's columns.")
    ] = None,
    refit: Annotated[
        bool, typer.Option("--fit", help="Find the constants of the cluster files again.")
    ] = False,
    json_path: JsonPath = None,
) -> None:
    """Predicts published steps; exits with 1 where a limit is missed, with 2 without data."""
    console = Console()
    try:
        checks, found = check_vtrain(console, data, rows or [])
        more, papers = check_papers(console, data, refit=refit)
    except DataError as error:
        console.print(str(error), style="red")
        raise typer.Exit(2) from None
    checks += more
    console.print(checks_table(checks))
    predicted = [
        {"source": f.row.source, "row": f.row.label, "measured_s": f.row.step_s,
         "predicted_s": f.predicted_s, "fitted": f.fitted}
        for f in (*found, *papers)
    ]  # fmt: skip
    figures = {"checks": checks, "rows": predicted}
    good = all(check.passed for check in checks)
    finish(console, good, "", json_path=json_path, figures=figures)


if __name__ == "__main__":
    typer.run(main)
