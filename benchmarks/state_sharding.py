"""`python -m benchmarks.state_sharding`: sharded state beside other systems', in one run.

merakc with `state_shards`, `DistributedDataParallel`, `ZeroRedundancyOptimizer`, FSDP2 and
DeepSpeed train the same Llama on the same data and ranks, one core a rank, over gloo: on this
machine's loopback, and on links of a given rate. Each is first compared with one process; then all
take turns. A contestant's step is the median over the rounds, of the slowest rank; its ratio to
merakc's at the same sharding is taken round by round.

What is hidden of the communication is measured on ranks of their own, whose process groups can
leave collectives out and replay them (`benchmarks.peers.probe`):
1 − (step with communication − step without any) / (the step's collectives one after the other,
with nothing else going on). On the loopback communication is computing, and of two ranks on two
cores little can be hidden.
"""

from __future__ import annotations

import dataclasses
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.harness import DocPath, JsonPath, bar, finish, markdown
from benchmarks.peers.networks import NetworkError, network_of
from benchmarks.peers.plans import NEEDS, about, make_environments
from benchmarks.peers.rounds import CHECKED_STEPS, Course, Entry, Row, ratios
from benchmarks.peers.training import Training

SHARDINGS = ("zero-0", "zero-1", "zero-2", "zero-3")
MERAKC, DEEPSPEED = "merakc_state", "deepspeed_zero"
OWN = "merakc"
# In float32 the order of a sum moves the weights by 1e-5 of their way in three steps.
MAX_ERROR = 1e-3
# A median over five rounds of a quiet machine moves by that much from run to run.
TOLERANCE = 0.02
CACHE = Path("~/.cache/merakc-peers")
WIDTH = 130


def entries(names: Sequence[str], shardings: Sequence[str]) -> list[Entry]:
    """The contestants at each sharding, merakc first; `names` are modules of `benchmarks.peers`."""
    found = []
    for sharding in shardings:
        listed = [
            Entry(MERAKC, sharding, OWN),
            *{
                "zero-0": [Entry("torch_ddp", sharding, "DDP")],
                "zero-1": [Entry("torch_ddp", sharding, "DDP + ZeroRedundancyOptimizer")],
                "zero-2": [Entry("fsdp2", sharding, "FSDP2, kept after forward")],
                "zero-3": [Entry("fsdp2", sharding, "FSDP2")],
            }[sharding],
            Entry(DEEPSPEED, sharding, f"DeepSpeed {sharding.replace('zero', 'ZeRO')}"),
        ]
        found += [entry for entry in listed if entry.peer in names]
    return found


def base_of(row: Row, rows: Sequence[Row]) -> Row | None:
    """Merakc's row at the same sharding on the same network, where both were measured."""
    for other in rows:
        same = (other.network, other.entry.form) == (row.network, row.entry.form)
        if same and other.entry.peer == MERAKC and other.steps_s and row.steps_s:
            return other
    return None


def complaints(rows: Sequence[Row]) -> list[str]:
    """What is not as it should be: weights, failures of merakc, peers that are faster."""
    found = []
    for row in rows:
        name = f"{row.network}, {row.entry.form}, {row.entry.label}"
        base = base_of(row, rows)
        if row.failure and row.entry.peer == MERAKC:
            found.append(f"{name}: {row.failure}")
        if not row.steps_s:
            continue
        if not row.error <= MAX_ERROR:
            found.append(f"{name}: weights are {row.error:.1e} from those of one process")
        elif base is not None and ratios(row, base)[0] < 1 - TOLERANCE:
            found.append(f"{name}: takes {ratios(row, base)[0]:.2f} of merakc's time")
    return found


HEAD = ("sharding", "contestant", "step", "to merakc", "hidden", "exposed", "alone", "weights")


def cells(row: Row, rows: Sequence[Row]) -> list[str]:
    """A row of the table, with rich's markup."""
    name = [row.entry.form, row.entry.label]
    if not row.steps_s:
        return [*name, "[yellow]missing[/]", *[""] * (len(HEAD) - 3)]
    base, ratio = base_of(row, rows), ""
    if base is not None and base is not row:
        middle, least, most = ratios(row, base)
        colour = "green" if middle >= 1 - TOLERANCE else "red"
        ratio = f"[{colour}]{middle:.2f}[/] ({least:.2f} to {most:.2f})"
    good = row.error <= MAX_ERROR
    return [
        *name,
        f"{row.step_s * 1e3:.0f} ms",
        ratio,
        f"{row.hidden:.2f}",
        f"{(row.with_s - row.without_s) * 1e3:.0f} ms",
        f"{row.alone_s * 1e3:.0f} ms",
        f"[{'green' if good else 'red'}]{row.error:.0e}[/]",
    ]


def table_of(network: str, rows: Sequence[Row]) -> Table:
    """The rows of one network."""
    table = Table(title=f"A training step with sharded state, {network}")
    for name in HEAD:
        table.add_column(name, justify="left" if name in HEAD[:2] else "right")
    own = [row for row in rows if row.network == network]
    for k, row in enumerate(own):
        if k and own[k - 1].entry.form != row.entry.form:
            table.add_section()
        table.add_row(*cells(row, rows))
    others = max((row.others for row in own), default=0.0)
    table.caption = (
        "to merakc: median (least to largest) over rounds, above 1 merakc is faster; weights: "
        f"relative to one process's; other processes took up to {others:.0%} of the CPU"
    )
    return table


def document(rows: Sequence[Row], notes: Sequence[str], about: str) -> str:
    """The tables as a page of the documentation."""
    parts = []
    for network in dict.fromkeys(row.network for row in rows):
        body = [HEAD, *(cells(row, rows) for row in rows if row.network == network)]
        parts.append(f"## {network.capitalize()}\n\n{markdown(body, left=2)}\n")
    noted = "".join(f"- {note}\n" for note in notes) or "Nothing is missing.\n"
    tables = "\n".join(parts)
    return f"""# Sharded state beside other systems

{about}

A step is the median over rounds in which all contestants take turns, of the slowest rank; `to
merakc` is the median (least to largest) of its ratio to merakc's at the same sharding, round by
round: above 1 merakc is faster. `alone` is what a step's collectives take one after the other
with nothing else going on, `exposed` what a step is longer than one whose collectives are left
out, and `hidden` is 1 − exposed / alone: on the loopback, where communication is computing on the
same cores, it can be below 0. `weights` is how far the weights are from those of one process after
{CHECKED_STEPS} steps of AdamW, relative to their way, for the worst parameter.

{tables}
{noted}"""


def measure_all(
    names: Sequence[str], found: list[Entry], course: Course, rounds: int, steps: int
) -> tuple[list[Row], list[str]]:
    """The rows of every network, and why a network is missing."""
    rows: list[Row] = []
    notes = []
    for name in names:
        try:
            with network_of(course.training.ranks, name) as made:
                rows += course.measure(made, found, rounds, steps)
        except NetworkError as error:
            notes.append(f"links of {name} are skipped: {error}")
    return rows, notes


def report(console: Console, rows: Sequence[Row], notes: Sequence[str]) -> list[str]:
    """Prints the tables, what is missing and what is wrong; gives the latter."""
    for network in dict.fromkeys(row.network for row in rows):
        console.print(table_of(network, rows))
    wrong = complaints(rows)
    for line in (*notes, *wrong):
        console.print(line, markup=False)
    return wrong


def main(
    dp: Annotated[int, typer.Option(help="Ranks.")] = 2,
    networks: Annotated[
        str, typer.Option(help='"loopback", and rates of links as tc writes them.')
    ] = "loopback,1gbit",
    shardings: Annotated[str, typer.Option(help="Comma-separated.")] = ",".join(SHARDINGS),
    peers: Annotated[str, typer.Option(help="Beside merakc.")] = "torch_ddp,fsdp2,deepspeed_zero",
    rounds: Annotated[int, typer.Option(help="Of which the median counts.")] = 7,
    steps: Annotated[int, typer.Option(help="Of a contestant in a round.")] = 3,
    layers: Annotated[int, typer.Option(help="Of the Llama.")] = 8,
    hidden: Annotated[int, typer.Option(help="Its width.")] = 256,
    samples: Annotated[int, typer.Option(help="Of a rank, 128 tokens each.")] = 4,
    cache: Annotated[Path, typer.Option(help="Where DeepSpeed is installed.")] = CACHE,
    json_path: JsonPath = None,
    doc: DocPath = None,
) -> None:
    """Times contestants in turns; exits with 1 where weights differ or a peer is faster."""
    start_s = time.perf_counter()
    # What ends it from outside is an exception, too: ranks end, and namespaces go.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    console = Console()
    console.width = max(console.width, WIDTH)
    training = Training(ranks=dp, layers=layers, hidden=hidden, samples=samples)
    found = entries([MERAKC, *peers.split(",")], shardings.split(","))
    with bar(console) as progress:
        task = progress.add_task("environments", total=None)
        needed = {NEEDS[entry.peer] for entry in found if entry.peer in NEEDS}
        environments, missing = make_environments(needed, cache)
        notes = [f"{peer} is missing: {why}" for peer, why in missing.items()]
        found = [e for e in found if e.peer != DEEPSPEED or e.peer in environments]
        names = networks.split(",")
        progress.update(task, total=len(names) * len(found) * (rounds + 2))

        def advance(text: str) -> None:
            progress.update(task, description=text, advance=1)

        course = Course(training, environments, advance)
        rows, skipped = measure_all(names, found, course, rounds, steps)
    notes += skipped + [f"{r.network}, {r.entry.label}: {r.failure}" for r in rows if r.failure]
    wrong, wall_s = report(console, rows, notes), time.perf_counter() - start_s
    tokens = f"{samples} × {training.sequence} tokens a rank, dp = {dp}, one core a rank"
    body = {"passed": not wrong, "wall_s": wall_s, "notes": notes, "wrong": wrong}
    listed = [dataclasses.asdict(r) | {"step_s": r.step_s, "hidden": r.hidden} for r in rows]
    finish(
        console, not wrong, f"{len(rows)} rows, {wall_s:.0f} s", json_path=json_path,
        figures=body | {"rows": listed}, doc=doc,
        page=lambda: document(
            rows, notes, about("benchmarks.state_sharding", training, tokens, environments, wall_s)
        ),
    )  # fmt: skip


if __name__ == "__main__":
    typer.run(main)
