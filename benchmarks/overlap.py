"""`python -m benchmarks.overlap`: tensor-parallel communication under computation, on slow links.

Two ranks train a Llama and a GPT-2 over links whose rate is chosen so that the collectives of a
step take a given share of it where they block, as Megatron-LM's do. Beside the blocking steps the
same ranks run steps that overlap: whole micro-batches, whose other work moves under collectives,
and micro-batches in parts. Links are slow in earnest (`benchmarks.peers.networks`).

It is measured twice: with kernels on the CPU, whose cores also carry the messages, so that each
byte costs computing time that nothing can hide; and with kernels that only wait
(`benchmarks.waiting`), as a GPU's are to the CPU. What is hidden, and that the simulation is right,
is asked of the second; of both, what is gained over blocking steps.

What is hidden is 1 − (step − step without communication) / communication alone, all measured, in
the form of the step that is meant: to multiply smaller matrices costs time that is not hidden
either way. The bound of a step is the longer of computing and communicating, graph by graph, with
what the CPU spends on messages among the computing. The simulated step is the one that the
planner's cost model expects of the same graphs, with machine and link as fast as the measured
computing and communicating alone.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.harness import DocPath, JsonPath, finish, markdown, rich_table
from benchmarks.overlap_steps import RANKS, Run, Size, measure
from benchmarks.peers.networks import LOOPBACK, NetworkError, slow_network
from benchmarks.reports import told_run
from merakc.machines.cluster import NOMINAL_CPU

MODELS = "llama,gpt2"
SHARES = "0.10,0.25,0.45,0.60"
PARTS = "1,2,4"
KERNELS = "waits,cpu"
# What a blocking step's idle link gives away to each collective, of some MiB. A packet that the
# kernel hands over whole (64 KiB) must fit, or it is cut up by the CPU that computes.
BURST = "72kb"
# What is asked for at a share of 45 %, in the fastest form, and of the simulation.
HIDDEN_SHARE, SPEEDUP, SPEEDUP_AT, TOLERANCE = 0.80, 1.35, 0.45, 0.10


@dataclass(frozen=True, slots=True)
class Row:
    """The forms of one model's step on one network; the first one blocks."""

    model: str
    kernels: str
    wanted_share: float
    rate_bit_per_s: int
    runs: tuple[Run, ...]

    @property
    def share(self) -> float:
        """What communication would take of the blocking step."""
        first = self.runs[0]
        return first.alone_s / (first.alone_s + first.without_s)

    @property
    def best(self) -> Run:
        """The fastest form that overlaps."""
        return min(self.runs[1:], key=lambda run: run.step_s)

    @property
    def speedup(self) -> float:
        """Of the fastest form over the blocking one."""
        return self.runs[0].step_s / self.best.step_s


def rows(
    names: Sequence[str],
    kernels: str,
    size: Size,
    shares: Sequence[float],
    parts: Sequence[int],
    rounds: int,
    console: Console,
) -> Iterator[Row]:
    """Every model on every network. Raises `NetworkError` where none can be made here."""
    waits = kernels == "waits"
    for name in names:
        (first,) = measure(
            name, size, (), network=LOOPBACK, machines=NOMINAL_CPU, rounds=rounds, waits=waits
        )
        for share in shares:
            alone_s = first.without_s * share / (1 - share)
            rate = round(8 * first.handed_bytes / alone_s)
            console.print(
                f"{name}, kernels {kernels}, {share:.0%}: links of {rate / 1e6:.0f} Mbit/s"
            )
            # The cost model counts an all-reduce twice; each of two ranks sends it once.
            machines = replace(NOMINAL_CPU, link_bytes_per_s=2 * first.handed_bytes / alone_s)
            with slow_network(RANKS, f"{rate}bit", BURST) as network:
                runs = measure(
                    name,
                    size,
                    parts,
                    network=network,
                    machines=machines,
                    rounds=rounds,
                    waits=waits,
                )
                yield Row(name, kernels, share, rate, runs)


HEADS = ("model", "kernels", "share", "links", "form", "step", "without", "alone", "its CPU",
         "hidden", "speedup", "bound", "simulated", "off", "others")  # fmt: skip


def row_texts(row: Row) -> Iterator[list[str]]:
    """A line for each form of a row's step."""
    for run in row.runs:
        first = run is row.runs[0]
        form = "blocking" if first else "whole" if run.parts == 1 else f"{run.parts} parts"
        links = f"{row.rate_bit_per_s / 1e6:.0f} Mbit/s"
        where = [row.model, row.kernels, f"{row.share:.0%}", links] if first else [""] * 4
        seconds = (run.step_s, run.without_s, run.alone_s, run.driven_s)
        yield [
            *where, form, *map(_milliseconds, seconds), f"{run.hidden:.0%}",
            f"{row.runs[0].step_s / run.step_s:.2f}", _milliseconds(run.bound_s),
            _milliseconds(run.simulated_s), f"{run.off:+.0%}", f"{run.others:.0%}",
        ]  # fmt: skip


def rows_table(found: Sequence[Row]) -> Table:
    """A row a model, share and form."""
    title = "Steps of two tensor-parallel ranks, communication under computation"
    rows = [HEADS, *(texts for row in found for texts in row_texts(row))]
    return rich_table(rows, left=0, title=title)


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms"


def document(found: Sequence[Row], failures: Sequence[str], size: Size) -> str:
    """The table as a page of the documentation, with when and on what it was measured."""
    body = markdown([HEADS, *(texts for row in found for texts in row_texts(row))], left=0)
    missed = "".join(f"- {line}\n" for line in failures) or "Everything asked for was found.\n"
    return f"""# Communication of tensor parallelism under computation

{told_run("benchmarks.overlap", sys.argv[1:])} Two ranks train over gloo
{size.layers} layers of {size.hidden} hidden units on {size.samples} samples of {size.sequence}
words.

Links are slow in earnest: every rank in a network namespace of its own, its packets through a token
bucket whose rate makes the collectives of a blocking step the given share of it. `kernels` are the
CPU's, whose cores also carry the messages, so that every byte costs computing time that nothing can
hide (`its CPU`, of a rank); or they wait for as long as the cost model has for them and leave the
CPU to the messages, as a GPU's do. `blocking` waits for each collective, as Megatron-LM does;
`whole` moves other work of a micro-batch under its collectives, `parts` interleaves parts of a
micro-batch. `without` is the same step with collectives left out, `alone` what they take one after
the other, `hidden` is 1 − (step − without) / alone. `bound` is the longer of computing (with `its
CPU`) and communicating, graph by graph. `simulated` is the planner's step of the same graphs with
both as fast as measured, `off` its error. `others` is what other processes took of the CPU.

Asked are, where kernels wait, {HIDDEN_SHARE:.0%} hidden by the best form at shares up to
{SPEEDUP_AT:.0%} and a simulation within {TOLERANCE:.0%}; of all kernels {SPEEDUP}x over blocking
steps at {SPEEDUP_AT:.0%}. On the CPU, a step whose parts run beside messages takes more than its
computing and `its CPU`: what else messages cost there, of caches and memory, no figure has.

{body}

{missed}"""


def complaints(found: Sequence[Row]) -> list[str]:
    """Where less is hidden, or the simulation is further off, than is asked for."""
    lines = []
    for row in found:
        where = f"{row.model}, kernels {row.kernels}, at {row.wanted_share:.0%}"
        if row.wanted_share <= SPEEDUP_AT and row.kernels == "waits":
            hidden = max(run.hidden for run in row.runs[1:])
            if hidden < HIDDEN_SHARE:
                lines.append(f"{where}: {hidden:.0%} of the communication is hidden")
        if row.wanted_share == SPEEDUP_AT and row.speedup < SPEEDUP:
            lines.append(f"{where}: {row.speedup:.2f}x over blocking steps")
        for run in row.runs if row.kernels == "waits" else ():
            if abs(run.off) > TOLERANCE:
                lines.append(f"{where}, {run.parts} parts: simulated {run.simulated_s * 1e3:.0f} "
                             f"ms, measured {run.step_s * 1e3:.0f} ms")  # fmt: skip
    return lines


def main(
    models: Annotated[str, typer.Option(help="Comma-separated.")] = MODELS,
    shares: Annotated[str, typer.Option(help="Of communication in a blocking step.")] = SHARES,
    parts: Annotated[str, typer.Option(help="Of a micro-batch; 1 runs it whole.")] = PARTS,
    kernels: Annotated[str, typer.Option(help="Which wait, or are the CPU's; or both.")] = KERNELS,
    layers: Annotated[int, typer.Option(help="Of the models.")] = 4,
    hidden: Annotated[int, typer.Option(help="Units; a multiple of 64.")] = 512,
    sequence: Annotated[int, typer.Option(help="Words of a sample.")] = 256,
    samples: Annotated[int, typer.Option(help="Of a micro-batch.")] = 4,
    rounds: Annotated[int, typer.Option(help="Of which the median counts.")] = 5,
    json_path: JsonPath = None,
    doc: DocPath = None,
) -> None:
    """Measures and simulates; exits with 1 where too little is hidden."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # leaves no namespaces behind
    console = Console(width=170)
    size = Size(layers, hidden, sequence, samples)
    counts = [int(k) for k in parts.split(",")]
    found = []
    try:
        asked = [float(share) for share in shares.split(",")]
        for kind in kernels.split(","):
            for row in rows(
                models.split(","),
                kind,
                size,
                shares=asked,
                parts=counts,
                rounds=rounds,
                console=console,
            ):
                found.append(row)
                console.print(rows_table([row]))
    except NetworkError as error:
        console.print(f"skipped: {error}")
        raise typer.Exit(0) from None
    console.print(rows_table(found))
    failures = complaints(found)
    for line in failures:
        console.print(line, markup=False)
    finish(
        console, not failures, "", json_path=json_path,
        figures={"passed": not failures, "size": size, "rows": found}, doc=doc,
        page=lambda: document(found, failures, size),
    )  # fmt: skip


if __name__ == "__main__":
    typer.run(main)
