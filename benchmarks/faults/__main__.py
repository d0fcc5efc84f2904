"""`python -m benchmarks.faults`: whether every fault of a rank ends all others, with its number.

Exits with 1 where a rank did not end, ended late, named another rank or none, or left something.
"""

from __future__ import annotations

import os
import random
import statistics
import tempfile
import time
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from benchmarks.faults.trials import Outcome, Trial, leftovers, shared
from benchmarks.faults.work import KINDS, LAYOUTS, Kind, plan_of
from benchmarks.harness import DocPath, JsonPath, bar, finish, known, markdown, rich_table

POLL_S = 0.005
console = Console(highlight=False, markup=False)
app = typer.Typer(add_completion=False)


def cells(kinds: list[str], layouts: list[str], trials: int) -> list[tuple[Kind, str]]:
    """So many trials, over all pairs of a kind and a layout in turn."""
    pairs = [(k, at) for k in KINDS if k.name in kinds for at in layouts if at in k.layouts]
    return [pairs[n % len(pairs)] for n in range(trials)]


def run(
    todo: list[tuple[Kind, str]],
    plans: dict[str, Path],
    limits: tuple[float, float],
    seed: int,
    jobs: int,
    minutes: float,
) -> list[Outcome]:
    """Runs the trials, so many at a time."""
    pick, found, running = random.Random(seed), list[Outcome](), list[Trial]()
    with bar(console) as shown:
        task = shown.add_task("", total=len(todo))
        waiting, start_s = list(todo), time.monotonic()
        while waiting or running:
            if time.monotonic() > start_s + 60 * minutes:
                waiting.clear()
            while waiting and len(running) < jobs:
                kind, layout = waiting.pop(0)
                shown.update(task, description=f"{kind.name}, {layout}")
                running.append(Trial(kind, layout, plans[layout], *limits, pick))
            time.sleep(POLL_S)
            for trial in list(running):
                outcome = trial.poll()
                if outcome is not None:
                    running.remove(trial)
                    found.append(outcome)
                    shown.advance(task)
                    for text in outcome.problems:
                        console.print(f"{outcome.kind}, {outcome.layout}: {text}")
    return found


def table(outcomes: list[Outcome]) -> list[list[str]]:
    """By kind: trials, those that went as they should, and seconds until all others had ended."""
    rows = [["fault", "trials", "as it should be", "raised: median", "largest", "ended: largest"]]
    by_kind = defaultdict(list)
    for outcome in outcomes:
        by_kind[outcome.kind].append(outcome)
    for kind, own in [*by_kind.items(), ("all", outcomes)]:
        good = sum(not o.problems for o in own)
        raised = [o.raised_s for o in own]
        rows.append([
            kind, str(len(own)), str(good), f"{statistics.median(raised):.2f} s",
            f"{max(raised):.2f} s", f"{max(o.ended_s for o in own):.2f} s",
        ])  # fmt: skip
    return rows


@app.command()
def main(
    trials: Annotated[int, typer.Option(help="How many.")] = 240,
    timeout_s: Annotated[float, typer.Option(help="`timeout_s` of the ranks.")] = 3.0,
    kinds: Annotated[str, typer.Option(help="Names of faults, with commas between.")] = "",
    layouts: Annotated[str, typer.Option(help="Layouts, with commas between.")] = "",
    slack_s: Annotated[float, typer.Option(help="Allowed beyond, on a busy machine.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the victims and moments.")] = 0,
    jobs: Annotated[int, typer.Option(help="Trials at a time.")] = 1,
    minutes: Annotated[float, typer.Option(help="No trial begins later.")] = 60.0,
    json_path: JsonPath = None,
    doc: DocPath = None,
) -> None:
    """Faults of one rank, by kind and layout, at random moments."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    chosen = known(kinds, [k.name for k in KINDS], "--kinds")
    todo = cells(chosen, known(layouts, list(LAYOUTS), "--layouts"), trials)
    with tempfile.TemporaryDirectory(prefix="merakc-faults-") as folder:
        os.environ["TMPDIR"], tempfile.tempdir = folder, folder
        plans = {}
        for layout in dict.fromkeys(layout for _, layout in todo):
            plans[layout] = Path(folder) / f"{layout.replace(' ', '')}.json"
            plans[layout].write_text(plan_of(layout))
        before = shared()
        outcomes = run(todo, plans, (timeout_s, slack_s), seed, jobs, minutes)
        left = leftovers(before)
    rows = table(outcomes)
    console.print(rich_table(rows))
    bad = [o for o in outcomes if o.problems]
    text = f"{len(outcomes)} trials, {len(bad)} of them not as they should be; left: {left or 0}"
    finish(
        console, not bad and not left, text,
        json_path=json_path, figures=outcomes, doc=doc, page=lambda: markdown(rows) + "\n",
    )  # fmt: skip


if __name__ == "__main__":
    app()
