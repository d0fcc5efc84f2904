"""`python -m benchmarks.host_link`: what it costs that activations or parameters are on the host.

A Llama is trained by kernels that only wait (`benchmarks.waiting`), beside a link to the host that
does too: graphs, moves and the runtime are real. The link is so fast that all that forwards keep
would go down and come back, one after the other, in a given multiple of a step's computing. Of that
a share moves. Or all parameters are fetched, in each forward and backward, in such a multiple.
Asked is that half of the activations are hidden where all would take as long as the computing, and
parameters where they take half as long, and that steps are as the simulator says. It exits with 1
where one is not.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Annotated

import torch
import typer
from rich.console import Console

import merakc
from benchmarks.harness import JsonPath, finish, rich_table, tracked
from benchmarks.overlap_steps import Size, build
from benchmarks.waiting import Device, HostLink, standing_in
from merakc.ir.offload import ACTIVATIONS, PARAMETERS
from merakc.kernels.host import bind_copies, unbind_copies
from merakc.lowering.lowered import Lowered
from merakc.lowering.predict import predict
from merakc.machines.cluster import NOMINAL_CPU, Cluster
from merakc.machines.links import Host
from merakc.train.model import ParallelModel

SIZE = Size(layers=8, hidden=256, sequence=128, samples=8)
MICRO_BATCHES = 2
# Kernels take so long that the calls of Python that issue them are a small part of a step.
MACHINES = replace(NOMINAL_CPU, gather_share=1.0, op_overhead_s=0.0)
MEMORY_BYTES = 1 << 33
RATIOS, SHARES = (0.5, 1.0, 1.5, 2.0), (0.25, 0.5, 0.75, 1.0)
# What is asked for: of half, up to a ratio of 1, how much longer the step may take; of the
# simulator, how far it may be off.
MOST_LONGER, HALF, MOST_RATIO, MOST_OFF = 0.03, 0.5, 1.0, 0.05
FETCHED_RATIOS, MOST_FETCHED_RATIO = (0.25, 0.5, 0.75, 1.0, 1.5), 0.5


@dataclass(frozen=True, slots=True)
class Row:
    """A step of which a share of what is kept is on the host, or its parameters: seconds measured
    and simulated.
    """

    kind: str
    ratio: float
    share: float
    host_bytes: int
    peak_bytes: int
    step_s: float
    simulated_s: float
    without_s: float  # the measured step that moves nothing

    @property
    def longer(self) -> float:
        """Than the step that moves nothing."""
        return self.step_s / self.without_s - 1

    @property
    def off(self) -> float:
        """How much too long the simulated step is."""
        return self.simulated_s / self.step_s - 1

    @property
    def passed(self) -> bool:
        """Whether it is as is asked for."""
        if self.kind == PARAMETERS:
            is_asked = self.ratio <= MOST_FETCHED_RATIO
        else:
            is_asked = self.share <= HALF and self.ratio <= MOST_RATIO
        hidden = self.longer <= MOST_LONGER or not is_asked
        return hidden and abs(self.off) <= MOST_OFF


@contextmanager
def host_link(link: HostLink) -> Iterator[None]:
    """Copies to the host and back go over the link."""
    bind_copies("cpu", link.copy)
    try:
        yield
    finally:
        unbind_copies("cpu")


def measured(machines: Cluster, offload: str, steps: int) -> tuple[float, Lowered]:
    """The median of the seconds of so many steps, and what was run."""
    device = Device(machines)
    assert machines.host is not None
    ids = torch.zeros(SIZE.samples, SIZE.sequence, dtype=torch.long)
    batch = {"input_ids": ids, "labels": ids}
    with standing_in(device), host_link(HostLink(device, machines.host.down_bytes_per_s)):
        model: ParallelModel = merakc.auto_parallel(
            build("llama", SIZE), batch, dp=1, tp=1, pp=1, micro_batches=MICRO_BATCHES,
            recompute="none", offload=offload, cluster=machines,
        )  # fmt: skip
        model(**batch).loss.backward()
        seconds = []
        for _ in range(steps):
            device.restart()
            start_s = time.perf_counter()
            model(**batch).loss.backward()
            device.finish()
            seconds.append(time.perf_counter() - start_s)
    (step,) = model._own("_steps").compiled.values()
    return statistics.median(seconds), step.lowered


def linked(bytes_per_s: float) -> Cluster:
    """The machines, with a link of that rate each way."""
    host = Host(MEMORY_BYTES, bytes_per_s, bytes_per_s, bytes_per_s, source="emulated")
    return replace(MACHINES, host=host)


def rows(steps: int, console: Console) -> Iterator[Row]:
    """Every ratio with every share of activations, and of parameters."""
    fast = linked(1e12)
    without_s, _ = measured(fast, "none", steps)
    kept_bytes = predict(measured(fast, ACTIVATIONS, 1)[1], fast)[0].host_bytes[0]
    (buckets,) = measured(fast, PARAMETERS, 1)[1].buckets
    held_bytes = sum(b.numel * b.dtype.itemsize for b in buckets)
    cells = [(ACTIVATIONS, ratio, share) for ratio in RATIOS for share in SHARES]
    cells += [(PARAMETERS, ratio, 1.0) for ratio in FETCHED_RATIOS]
    for kind, ratio, share in tracked(cells, lambda c: "{}, ratio {}".format(*c), console):
        both_bytes = 2 * (held_bytes if kind == PARAMETERS else kept_bytes)
        machines = linked(both_bytes * MICRO_BATCHES / (ratio * without_s))
        part = f", {share * kept_bytes / 1e3:.3f} kB" if kind == ACTIVATIONS else ""
        step_s, lowered = measured(machines, kind + part, steps)
        prediction, _ = predict(lowered, machines)
        there_bytes = held_bytes if kind == PARAMETERS else prediction.host_bytes[0]
        yield Row(
            kind, ratio, share, there_bytes, prediction.peak_bytes[0],
            step_s=step_s, simulated_s=prediction.step_s, without_s=without_s,
        )  # fmt: skip


def texts_of(found: list[Row]) -> list[list[str]]:
    """The table."""
    heads = ["what", "copies", "moves", "on the host", "peak", "step", "longer", "simulated",
             "off"]  # fmt: skip
    return [
        heads,
        *(
            [r.kind, f"{r.ratio}", f"{r.share:.0%}", f"{r.host_bytes / 2**20:.1f} MiB",
             f"{r.peak_bytes / 2**20:.1f} MiB", f"{r.step_s * 1e3:.1f} ms", f"{r.longer:+.1%}",
             f"{r.simulated_s * 1e3:.1f} ms", f"{r.off:+.1%}"]
            for r in found
        ),
    ]  # fmt: skip


def main(
    steps: Annotated[int, typer.Option(min=1, help="Of which the median counts.")] = 5,
    json_path: JsonPath = None,
) -> None:
    """Measures steps with moves to the host, on a link and a device that only wait."""
    torch.set_num_threads(1)
    console = Console()
    found = list(rows(steps, console))
    console.print(rich_table(texts_of(found), left=0))
    text = f"half of what is kept and all parameters, for {MOST_LONGER:.0%} of a step at most"
    finish(console, all(r.passed for r in found), text, json_path=json_path, figures=found)


if __name__ == "__main__":
    typer.run(main)
