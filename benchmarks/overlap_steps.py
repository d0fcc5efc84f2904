"""Steps of tensor-parallel ranks, with their communication, without it, and that alone."""

from __future__ import annotations

import ctypes
import os
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import transformers
from torch import nn

import merakc
from benchmarks.peers import probe
from benchmarks.peers.networks import Network, NetworkError
from benchmarks.peers.rounds import MAX_OTHERS, cpu_busy_s
from benchmarks.ranks import run_ranks
from benchmarks.waiting import Device, standing_in
from merakc.costs.device import Place, place_on
from merakc.costs.nodes import graph_seconds, link_seconds, node_seconds
from merakc.ir.graph import Graph
from merakc.kernels.ops import STARTED
from merakc.machines.cluster import NOMINAL_CPU, Cluster
from merakc.runtime.agreement import Agreement
from merakc.train.model import ParallelModel

RANKS = 2
MICRO_BATCHES = 1
VOCABULARY = 512
CLONE_NEWNET = 0x40000000  # linux/sched.h
TIMEOUT_S = 1200.0
MAX_TRIES = 4


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

    Seconds are medians over rounds, of the slower rank; `driven_s` are those of a CPU that a rank
    takes to communicate and cannot compute in. `others` is the share of the CPU that other
    processes took in the worst round. `simulated_s` and `bound_s` are of rank 0.
    """

    parts: int
    step_s: float
    without_s: float
    alone_s: float
    driven_s: float
    simulated_s: float
    bound_s: float
    handed_bytes: int
    others: float

    @property
    def hidden(self) -> float:
        """The share of the communication that costs no time."""
        return 1 - (self.step_s - self.without_s) / self.alone_s

    @property
    def off(self) -> float:
        """How much too long the simulated step is."""
        return self.simulated_s / self.step_s - 1


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
    """One form of the step on this rank, computed by the CPU or by a `device` that waits."""

    def __init__(
        self, name: str, size: Size, parts: int, machines: Cluster, tape: probe.Tape,
        device: Device | None,
    ) -> None:  # fmt: skip
        generator = torch.Generator().manual_seed(dist.get_world_size())
        ids = torch.randint(VOCABULARY, (size.samples, size.sequence), generator=generator)
        self.batch, self.tape, self.parts = {"input_ids": ids, "labels": ids}, tape, parts
        self.device, self.driven_s = device, list[float]()
        with standing_in(device) if device else nullcontext():
            self.model: ParallelModel = merakc.auto_parallel(
                build(name, size), self.batch, dp=1, tp=dist.get_world_size(), pp=1,
                micro_batches=MICRO_BATCHES, recompute="none", sequence_parallel=False,
                overlap=parts, cluster=machines,
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
        if self.device:
            self.device.restart()
        self.model(**self.batch).loss.backward()
        if self.device:
            self.device.finish()

    def visit(self) -> None:
        """One round: with the communication, without any, and that alone.

        Without it ranks cannot compare what they were given.
        """
        self.seconds["with"].append(self._timed(self.step)[0])
        with patch.object(Agreement, "share", lambda _, loss, step, bad: (loss, 0)):
            self.seconds["without"].append(self._timed(self.step, muted=True)[0])
        alone_s, spent_s = self._timed(self.communicate)
        self.seconds["alone"].append(alone_s)
        self.driven_s.append(spent_s / dist.get_world_size())

    def communicate(self) -> None:
        """The collectives of a step, one after the other. Those of parts of a micro-batch do not
        wait for each other: the next one leaves before the last has ended.
        """
        last = None
        for run, arguments in self.calls:
            work = run(*arguments)
            for ended in (last,) if self.parts > 1 else (work,):
                if ended is not None:
                    ended.wait()
            last = work
        if last is not None:
            last.wait()

    def _timed(self, work: Callable[[], None], *, muted: bool = False) -> tuple[float, float]:
        """Seconds of the slower rank, in the quietest of some tries, and those of all CPUs."""
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
            others = max(0.0, spent_s - own_s) / (wall_s * (os.cpu_count() or 1))
            tries.append((others, wall_s, spent_s))
            if tries[-1][0] <= MAX_OTHERS:
                break
        others, wall_s, spent_s = min(tries)
        self.others = max(self.others, others)
        return wall_s, spent_s

    def run(self) -> Run:
        """What the rounds have found, beside what the cost model expects."""
        with_s, without_s, alone_s = map(statistics.median, self.seconds.values())
        driven_s = 0.0 if self.device else statistics.median(self.driven_s)
        simulated_s, bound_s = simulated(self.graphs, without_s, alone_s, driven_s)
        tensors = [t for _, args in self.calls for t in torch.utils._pytree.tree_leaves(args)]
        handed = sum(t.nbytes for t in tensors if isinstance(t, torch.Tensor))
        return Run(
            self.parts,
            with_s,
            without_s,
            alone_s=alone_s,
            driven_s=driven_s,
            simulated_s=simulated_s,
            bound_s=bound_s,
            handed_bytes=handed,
            others=self.others,
        )


def simulated(
    graphs: Sequence[Graph], without_s: float, alone_s: float, driven_s: float = 0.0
) -> tuple[float, float]:
    """Seconds of a step and its bound, on machines that compute and communicate in these times.

    The figures of kernels are scaled until their sums are the measured ones. The CPU that computes
    also spends `driven_s` on collectives: on blocking ones within their time, on others beside.
    """

    def totals(place: Place, slower: float) -> list[tuple[float, float, float]]:
        """Of each graph, seconds of computing, of the link, and those of blocking collectives."""
        found = []
        for graph in graphs:
            specs, compute_s, link_s, blocking_s = graph.specs(), 0.0, 0.0, 0.0
            for node in graph.nodes:
                own_s = link_seconds(node, specs, place)
                link_s += own_s
                if own_s and node.op not in STARTED:
                    blocking_s += own_s
                else:
                    compute_s += slower * node_seconds(node, specs, place)
            found.append((compute_s, link_s, blocking_s))
        return found

    machines = replace(NOMINAL_CPU, link_latency_s=0.0, op_overhead_s=0.0)
    each = totals(place_on(machines, 2), 1.0)
    compute_s, link_s, blocking_s = (sum(column) for column in zip(*each, strict=True))
    without_s += driven_s * (1 - blocking_s / link_s)
    slower, longer = without_s / MICRO_BATCHES / compute_s, alone_s / MICRO_BATCHES / link_s
    machines = replace(machines, link_bytes_per_s=machines.link_bytes_per_s / longer)
    place = place_on(machines, 2)
    step_s = sum(graph_seconds(graph, place, slower) for graph in graphs)
    bound_s = sum(max(compute_s, link_s) for compute_s, link_s, _ in totals(place, slower))
    return MICRO_BATCHES * step_s, MICRO_BATCHES * bound_s


def measure_rank(
    name: str, size: Size, parts: Sequence[int], machines: Cluster, rounds: int, tape: probe.Tape,
    waits: bool,
) -> list[Run]:  # fmt: skip
    """All forms in turns, on this rank; collective."""
    device = Device(NOMINAL_CPU) if waits else None
    contestants = [Contestant(name, size, count, machines, tape, device) for count in parts]
    for k in range(rounds):
        for contestant in contestants[k % len(contestants) :] + contestants[: k % len(contestants)]:
            contestant.visit()
    return [contestant.run() for contestant in contestants]


def measure(
    name: str, size: Size, parts: Sequence[int], network: Network, machines: Cluster, rounds: int,
    waits: bool,
) -> tuple[Run, ...]:  # fmt: skip
    """All forms of a model's step on one network; the first one blocks. With `waits` nothing is
    computed, and kernels take the time that the cost model has for them.
    """
    tape = probe.Tape()
    found = run_ranks(
        RANKS, measure_rank, name, size, [0, *parts], machines, rounds, tape, waits,
        timeout_s=TIMEOUT_S, enter=lambda rank: join(network, tape, rank), backend=probe.NAME,
    )  # fmt: skip
    return tuple(found[0])
