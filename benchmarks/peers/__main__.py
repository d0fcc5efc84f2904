"""`python -m benchmarks.peers`: merakc and other systems on the same work, in one run.

Every contestant trains the same Llama on the same data, ranks and dtype, one core a rank, over
gloo: on this machine's loopback and on links of a given rate. Each is first compared with one
process; then all take turns, and what other processes take of the CPU is watched.
"""

from __future__ import annotations

import dataclasses
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks.harness import DocPath, JsonPath, bar, in_a_folder, known
from benchmarks.peers.environments import Environment
from benchmarks.peers.lines import user_lines
from benchmarks.peers.networks import NetworkError, network_of
from benchmarks.peers.plans import (
    ABSENT,
    NEEDS,
    PLANS,
    about,
    chosen,
    entries,
    make_environments,
    training_of,
)
from benchmarks.peers.results import Result, complaints, document, failures, plot, table_of, verdict
from benchmarks.peers.rounds import Advance, Course, Entry
from benchmarks.peers.store import Store
from benchmarks.peers.training import Training

CACHE = Path("~/.cache/merakc-peers")
WIDTH = 140


@dataclasses.dataclass(frozen=True, slots=True)
class Comparison:
    """What is measured, and with what; `missing` says what an adapter lacks, and why."""

    base: Training
    peers: str
    rounds: int
    steps: int
    environments: dict[str, Environment]
    missing: dict[str, str]
    known: tuple[Result, ...] = ()  # of an earlier run

    def entries(self, plan: str) -> list[Entry]:
        """The contestants of a layout that can be had here."""
        found = chosen(entries(training_of(plan, self.base)), self.peers)
        return [entry for entry in found if NEEDS.get(entry.peer) not in self.missing]

    def measure(self, plan: str, network: str, advance: Advance) -> Result:
        """A layout on a network. Raises `NetworkError` where it cannot be made."""
        for result in self.known:
            if result.plan == plan and result.network in (network, f"{network} links"):
                return result
        training, found = training_of(plan, self.base), self.entries(plan)
        course = Course(training, self.environments, advance)
        with network_of(training.ranks, network) as links:
            rows = course.measure(links, found, self.rounds, self.steps, shares=False)
        lines = tuple(user_lines(entry.peer, training, entry.form) for entry in found)
        return Result(plan, links.name, training, tuple(rows), lines)


def measure_all(
    comparison: Comparison,
    plans: Sequence[str],
    networks: Sequence[str],
    console: Console,
    keep: Callable[[Sequence[Result]], None],
) -> tuple[list[Result], list[str]]:
    """All layouts on all networks, printed and kept as they come, and why a network is missing."""
    results: list[Result] = []
    notes = []
    with bar(console) as progress:
        counts = [len(comparison.entries(plan)) * (comparison.rounds + 1) for plan in plans]
        task = progress.add_task("", total=sum(counts) * len(networks))
        for network in networks:
            for plan in plans:

                def advance(text: str, plan: str = plan) -> None:
                    progress.update(task, description=f"{plan}, {text}", advance=1)

                try:
                    results.append(comparison.measure(plan, network, advance))
                except NetworkError as error:
                    notes.append(f"links of {network} are skipped: {error}")
                    break
                keep(results)
                console.print(table_of(results[-1]))
                console.print(verdict(results[-1]), markup=False)
    return results, notes


def main(
    plans: Annotated[str, typer.Option(help="Layouts, comma-separated.")] = ",".join(PLANS),
    networks: Annotated[
        str, typer.Option(help='"loopback", and rates of links as tc writes them.')
    ] = "loopback,1gbit",
    peers: Annotated[str, typer.Option(help="Modules of benchmarks.peers; all if empty.")] = "",
    rounds: Annotated[int, typer.Option(help="Rounds, of which the median counts.")] = 5,
    steps: Annotated[int, typer.Option(help="Steps of a contestant in a round.")] = 3,
    layers: Annotated[int, typer.Option(help="Layers of the Llama.")] = 8,
    hidden: Annotated[int, typer.Option(help="Width of the Llama.")] = 256,
    cache: Annotated[Path, typer.Option(help="Where peers are installed.")] = CACHE,
    json_path: JsonPath = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Measure only what is not yet in --json.")
    ] = False,
    doc: DocPath = None,
    picture: Annotated[
        Path | None, typer.Option("--plot", help="Also draw the steps here.", callback=in_a_folder)
    ] = None,
) -> None:
    """Times contestants in turns; exits with 1 where merakc is wrong or a right peer faster."""
    # What ends it from outside is an exception, too: ranks end, and namespaces go.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    console = Console()
    console.width = max(console.width, WIDTH)
    base, names = Training(layers=layers, hidden=hidden), known(plans, PLANS, "--plans")
    store = Store(json_path, {"rounds": rounds, "steps": steps, "peers": peers})
    earlier = store.tables(base) if resume else ()
    every = {entry.peer for name in PLANS for entry in entries(training_of(name, base))}
    known(peers, sorted(every), "--peers")
    listed = [e for name in names for e in chosen(entries(training_of(name, base)), peers)]
    needed = {NEEDS[entry.peer] for entry in listed if entry.peer in NEEDS}
    with console.status("installing peers"):
        environments, missing = make_environments(needed, cache)
    comparison = Comparison(base, peers, rounds, steps, environments, missing, earlier)
    results, notes = measure_all(comparison, names, networks.split(","), console, store.keep)
    notes += [f"{name}: {why}" for name, why in (missing | ABSENT).items()] + failures(results)
    wrong = complaints(results)
    for line in (*notes, *wrong):
        console.print(line, markup=False)
    console.print(f"{'FAILED' if wrong else 'passed'}: {len(results)} tables, {store.wall_s:.0f} s")
    store.keep(results, notes)
    if doc is not None:
        tokens = f"8 × {base.sequence} tokens a step, one core a rank where there are as many"
        told = about("benchmarks.peers", base, tokens, environments, store.wall_s)
        doc.write_text(document(results, notes, told, picture.name if picture else ""))
    if picture is not None:
        plot(picture, results)
    raise typer.Exit(bool(wrong))


if __name__ == "__main__":
    typer.run(main)
