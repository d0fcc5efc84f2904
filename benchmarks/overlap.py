"""`python -m benchmarks.overlap`: tensor-parallel communication under computation, on slow links.

Two ranks train a Llama and a GPT-2 over links whose rate is chosen so that the collectives of a
step take a given share of it where they block, as Megatron-LM's do. Beside the blocking steps the
same ranks run steps that overlap: whole micro-batches, whose other work moves under collectives,
and micro-batches in parts. Links are slow in earnest (`benchmarks.peers.networks`).

What is hidden is 1 − (step − step without communication) / communication alone, all measured, in
the form of the step that is meant: to multiply smaller matrices costs time that is not hidden
either way. The bound of a step is the longer of computing and communicating, graph by graph. The
simulated step is the one that the planner's cost model expects of the same graphs, with machine
and link as fast as the measured computing and communicating alone.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import transformers
import typer
from rich.console import Console
from rich.table import Table
from torch import nn

import merakc
from benchmarks.peers import probe
from benchmarks.peers.networks import LOOPBACK, Network, NetworkError, slow_network
from benchmarks.peers.rounds import MAX_OTHERS, cpu_busy_s
from benchmarks.ranks import run_ranks
from merakc.cluster import NOMINAL_CPU, Cluster
from merakc.costs.roofline import graph_seconds, link_seconds, node_seconds
from merakc.ir.graph import Graph
from merakc.model import ParallelModel

MODELS = "llama,gpt2"
SHARES = "0.10,0.25,0.45,0.60"
PARTS = "1,2,4"
RANKS = 2
MICRO_BATCHES = 1
VOCABULARY = 512
CLONE_NEWNET = 0x40000000  # linux/sched.h
TIMEOUT_S = 1200.0
# What a blocking step's idle link gives away to each collective, of some MiB. A packet that the
# kernel hands over whole (64 KiB) must fit, or it is cut up by the CPU that computes.
BURST = "72kb"
MAX_TRIES = 4
# What is asked for at a share of 45 %, in the form with two parts, and of the simulation.
HIDDEN_SHARE, SPEEDUP, SPEEDUP_AT, TOLERANCE = 0.80, 1.35, 0.45, 0.10


@dataclass(frozen=True, slots=True)
class Size:
    """What is trained."""

    layers: int
    hidden: int
    sequence: int
    samples: int


@dataclass(frozen=True, slots=True)
class Run:
    """One form of the step: `parts` of a micro-batch, 0 where collectives block.

    Seconds are medians over rounds, of the slower rank; `others` is the share of the CPU that other
    processes took in the worst round. `simulated_s` and `bound_s` are of rank 0.
    """

    parts: int
    step_s: float
    without_s: float
    alone_s: float
    simulated_s: float
    bound_s: float
    handed_bytes: int
    others: float

    @property
    def hidden(self) -> float:
        """The share of the communication that costs no time."""
        return 1 - (self.step_s - self.without_s) / self.alone_s


@dataclass(frozen=True, slots=True)
class Row:
    """The forms of one model's step on one network; the first one blocks."""

    model: str
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


def build(name: str, size: Size) -> nn.Module:
    """A model of that size, without dropout: it would take computing time of its own."""
    torch.manual_seed(0)
    heads = size.hidden // 64
    if name == "gpt2":
        config: Any = transformers.GPT2Config(
            vocab_size=VOCABULARY, n_positions=size.sequence, n_embd=size.hidden,
            n_layer=size.layers, n_head=heads, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
            use_cache=False, bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        return transformers.GPT2LMHeadModel(config)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=size.hidden, intermediate_size=8 * size.hidden // 3,
        num_hidden_layers=size.layers, num_attention_heads=heads, num_key_value_heads=heads,
        max_position_embeddings=size.sequence, use_cache=False, pad_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def join(network: Network, tape: probe.Tape, rank: int) -> None:
    """Moves this process into the namespace of its rank, and lets process groups obey the tape."""
    os.environ["GLOO_SOCKET_IFNAME"] = network.interface
    if network.namespaces:
        with Path("/var/run/netns", network.namespaces[rank]).open() as namespace:
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.setns(namespace.fileno(), CLONE_NEWNET):
                raise NetworkError(f"setns: {os.strerror(ctypes.get_errno())}")
    probe.install(tape)


class Contestant:
    """One form of the step on this rank."""

    def __init__(
        self, name: str, size: Size, parts: int, machines: Cluster, tape: probe.Tape
    ) -> None:
        generator = torch.Generator().manual_seed(dist.get_world_size())
        ids = torch.randint(VOCABULARY, (size.samples, size.sequence), generator=generator)
        self.batch, self.tape, self.parts = {"input_ids": ids, "labels": ids}, tape, parts
        self.model: ParallelModel = merakc.auto_parallel(
            build(name, size), self.batch, dp=1, tp=dist.get_world_size(), pp=1,
            micro_batches=MICRO_BATCHES, recompute="none", sequence_parallel=False, overlap=parts,
            cluster=machines,
        )  # fmt: skip
        self.step()
        tape.recording = True
        self.step()
        tape.recording = False
        self.calls, tape.calls = tape.calls, []
        self.seconds: dict[str, list[float]] = {"with": [], "without": [], "alone": []}
        self.others = 0.0

    @property
    def graphs(self) -> list[Graph]:
        """What a micro-batch runs."""
        (step,) = self.model._own("_steps").compiled.values()
        (chunk,) = step.chunks.values()
        return [chunk.forward, chunk.backward]

    def step(self) -> None:
        """Forward and backward of a batch."""
        for parameter in self.model.parameters():
            parameter.grad = None
        self.model(**self.batch).loss.backward()

    def visit(self) -> None:
        """One round: with the communication, without any, and that alone."""
        self.seconds["with"].append(self._timed(self.step))
        self.seconds["without"].append(self._timed(self.step, muted=True))
        self.seconds["alone"].append(self._timed(self._replay))

    def _replay(self) -> None:
        for run, arguments in self.calls:
            run(*arguments).wait()

    def _timed(self, work: Callable[[], None], *, muted: bool = False) -> float:
        """Seconds of the slower rank, in the quietest of some tries."""
        tries = []
        for _ in range(MAX_TRIES):
            dist.barrier()
            self.tape.muted = muted
            before_s, own_s, start_s = cpu_busy_s(), time.process_time(), time.perf_counter()
            work()
            wall_s = time.perf_counter() - start_s
            found = torch.tensor([wall_s, time.process_time() - own_s, cpu_busy_s() - before_s])
            self.tape.muted = False
            everyone = [torch.empty_like(found) for _ in range(dist.get_world_size())]
            dist.all_gather(everyone, found)
            wall_s, own_s = float(everyone[0][0]), sum(float(each[1]) for each in everyone)
            wall_s = max(wall_s, *(float(each[0]) for each in everyone))
            spent_s = max(float(each[2]) for each in everyone)
            tries.append((max(0.0, spent_s - own_s) / (wall_s * (os.cpu_count() or 1)), wall_s))
            if tries[-1][0] <= MAX_OTHERS:
                break
        others, wall_s = min(tries)
        self.others = max(self.others, others)
        return wall_s

    def run(self) -> Run:
        """What the rounds have found, beside what the cost model expects."""
        with_s, without_s, alone_s = map(statistics.median, self.seconds.values())
        simulated_s, bound_s = simulated(self.graphs, without_s, alone_s)
        tensors = [t for _, args in self.calls for t in torch.utils._pytree.tree_leaves(args)]
        handed = sum(t.nbytes for t in tensors if isinstance(t, torch.Tensor))
        return Run(
            self.parts, with_s, without_s, alone_s, simulated_s, bound_s, handed, self.others
        )


def simulated(graphs: Sequence[Graph], without_s: float, alone_s: float) -> tuple[float, float]:
    """Seconds of a step and its bound, on machines that compute and communicate in these times.

    The roofline's figures are scaled until its sums are the measured ones.
    """

    def totals(machines: Cluster) -> list[tuple[float, float]]:
        found = []
        for graph in graphs:
            specs = graph.specs()
            link_s = [link_seconds(n, specs, machines) for n in graph.nodes]
            compute_s = [0.0 if link and "start" not in n.op else node_seconds(n, specs, machines)
                         for n, link in zip(graph.nodes, link_s, strict=True)]  # fmt: skip
            found.append((sum(compute_s), sum(link_s)))
        return found

    machines = replace(NOMINAL_CPU, link_latency_s=0.0)
    compute_s, link_s = (sum(each) for each in zip(*totals(machines), strict=True))
    slower, longer = without_s / MICRO_BATCHES / compute_s, alone_s / MICRO_BATCHES / link_s
    machines = replace(
        machines,
        flops_per_s=machines.flops_per_s / slower,
        bytes_per_s=machines.bytes_per_s / slower,
        op_overhead_s=machines.op_overhead_s * slower,
        link_bytes_per_s=machines.link_bytes_per_s / longer,
    )
    step_s = sum(graph_seconds(graph, machines) for graph in graphs)
    bound_s = sum(max(each) for each in totals(machines))
    return MICRO_BATCHES * step_s, MICRO_BATCHES * bound_s


def measure_rank(
    name: str, size: Size, parts: Sequence[int], machines: Cluster, rounds: int, tape: probe.Tape
) -> list[Run]:
    """All forms in turns, on this rank; collective."""
    contestants = [Contestant(name, size, count, machines, tape) for count in parts]
    for k in range(rounds):
        for contestant in contestants[k % len(contestants) :] + contestants[: k % len(contestants)]:
            contestant.visit()
    return [contestant.run() for contestant in contestants]


def measure(
    name: str, size: Size, parts: Sequence[int], network: Network, machines: Cluster, rounds: int
) -> tuple[Run, ...]:
    """All forms of a model's step on one network; the first one blocks."""
    tape = probe.Tape()
    found = run_ranks(
        RANKS, measure_rank, name, size, [0, *parts], machines, rounds, tape,
        timeout_s=TIMEOUT_S, enter=lambda rank: join(network, tape, rank), backend=probe.NAME,
    )  # fmt: skip
    return tuple(found[0])


def rows(
    names: Sequence[str],
    size: Size,
    shares: Sequence[float],
    parts: Sequence[int],
    rounds: int,
    console: Console,
) -> Iterator[Row]:
    """Every model on every network. Raises `NetworkError` where none can be made here."""
    for name in names:
        (first,) = measure(name, size, (), LOOPBACK, NOMINAL_CPU, rounds)
        for share in shares:
            alone_s = first.without_s * share / (1 - share)
            rate = round(8 * first.handed_bytes / alone_s)
            console.print(f"{name}, {share:.0%}: links of {rate / 1e6:.0f} Mbit/s")
            # The cost model counts an all-reduce twice; each of two ranks sends it once.
            machines = replace(NOMINAL_CPU, link_bytes_per_s=2 * first.handed_bytes / alone_s)
            with slow_network(RANKS, f"{rate}bit", BURST) as network:
                yield Row(name, share, rate, measure(name, size, parts, network, machines, rounds))


def rows_table(found: Sequence[Row]) -> Table:
    """A row a model, share and form."""
    table = Table(title="Steps of two tensor-parallel ranks, communication under computation")
    heads = ("model", "share", "links", "form", "step", "without", "alone", "hidden", "speedup",
             "bound", "simulated", "off", "others")  # fmt: skip
    for head in heads:
        table.add_column(head, justify="right")
    for row in found:
        for run in row.runs:
            blocking = run is row.runs[0]
            form = "blocking" if blocking else "whole" if run.parts == 1 else f"{run.parts} parts"
            table.add_row(
                row.model if blocking else "",
                f"{row.share:.0%}" if blocking else "",
                f"{row.rate_bit_per_s / 1e6:.0f} Mbit/s" if blocking else "",
                form, *(f"{s * 1e3:.0f} ms" for s in (run.step_s, run.without_s, run.alone_s)),
                f"{run.hidden:.0%}", f"{row.runs[0].step_s / run.step_s:.2f}",
                f"{run.bound_s * 1e3:.0f} ms", f"{run.simulated_s * 1e3:.0f} ms",
                f"{run.simulated_s / run.step_s - 1:+.0%}", f"{run.others:.0%}",
            )  # fmt: skip
    return table


def complaints(found: Sequence[Row]) -> list[str]:
    """Where less is hidden, or the simulation is further off, than is asked for."""
    lines = []
    for row in found:
        where = f"{row.model} at {row.wanted_share:.0%}"
        if row.wanted_share <= SPEEDUP_AT:
            hidden = max(run.hidden for run in row.runs[1:])
            if hidden < HIDDEN_SHARE:
                lines.append(f"{where}: {hidden:.0%} of the communication is hidden")
        if row.wanted_share == SPEEDUP_AT and row.speedup < SPEEDUP:
            lines.append(f"{where}: {row.speedup:.2f}x over blocking steps")
        for run in row.runs:
            if abs(run.simulated_s / run.step_s - 1) > TOLERANCE:
                lines.append(f"{where}, {run.parts} parts: simulated {run.simulated_s * 1e3:.0f} "
                             f"ms, measured {run.step_s * 1e3:.0f} ms")  # fmt: skip
    return lines


def main(
    models: Annotated[str, typer.Option(help="Comma-separated.")] = MODELS,
    shares: Annotated[str, typer.Option(help="Of communication in a blocking step.")] = SHARES,
    parts: Annotated[str, typer.Option(help="Of a micro-batch; 1 runs it whole.")] = PARTS,
    layers: Annotated[int, typer.Option(help="Of the models.")] = 4,
    hidden: Annotated[int, typer.Option(help="Units; a multiple of 64.")] = 512,
    sequence: Annotated[int, typer.Option(help="Words of a sample.")] = 256,
    samples: Annotated[int, typer.Option(help="Of a micro-batch.")] = 4,
    rounds: Annotated[int, typer.Option(help="Of which the median counts.")] = 5,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Also write the figures here.")
    ] = None,
) -> None:
    """Measures and simulates; exits with 1 where too little is hidden."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # leaves no namespaces behind
    console = Console(width=150)
    size = Size(layers, hidden, sequence, samples)
    counts = [int(k) for k in parts.split(",")]
    found = []
    try:
        asked = [float(share) for share in shares.split(",")]
        for row in rows(models.split(","), size, asked, counts, rounds, console):
            found.append(row)
            console.print(rows_table([row]))
    except NetworkError as error:
        console.print(f"skipped: {error}")
        raise typer.Exit(0) from None
    console.print(rows_table(found))
    failures = complaints(found)
    for line in failures:
        console.print(line, markup=False)
    console.print("FAILED" if failures else "passed")
    if json_path is not None:
        body = {"passed": not failures, "size": dataclasses.asdict(size),
                "rows": [dataclasses.asdict(row) for row in found]}  # fmt: skip
        json_path.write_text(json.dumps(body, indent=1) + "\n")
    raise typer.Exit(bool(failures))


if __name__ == "__main__":
    typer.run(main)
