"""`python -m benchmarks.host_link`: what it costs that activations or parameters are on the host.

A Llama is trained by kernels that only wait (`benchmarks.waiting`), beside a link to the host that
does too: graphs, moves and the runtime are real. The link is so fast that all that forwards keep
would go down and come back, one after the other, in a given multiple of a step's computing. Of that
a share moves. Or all parameters are fetched, in each forward and backward, in such a multiple. Or
the host updates all parameters in such a part of a step, behind it or in its backward.
Asked is that half of the activations are hidden where all would take as long as the computing,
parameters where they take half as long, and four fifths of an update that takes as much, and that
steps are as the simulator says. It exits with 1 where one is not.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

import merakc
from benchmarks.harness import JsonPath, finish, rich_table, tracked
from benchmarks.overlap_steps import Size, build
from benchmarks.waiting import Device, HostLink, HostStreams, standing_in
from merakc.costs.work.sharded import OPTIMIZER_STATES
from merakc.ir.offload import ACTIVATIONS, OPTIMIZER, PARAMETERS
from merakc.kernels.host import bind_copies, unbind_copies
from merakc.lowering.lowered import Lowered
from merakc.lowering.predict import predict
from merakc.machines.cluster import NOMINAL_CPU, Cluster
from merakc.machines.links import Host
from merakc.runtime.shards import Bucket
from merakc.runtime.streams import stand_in
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
# Of updates: the part of the way down in the whole, and the part of the whole that may be left.
UPDATE_RATIOS, DOWN_SHARE, MOST_LEFT = (0.125, 0.25, 0.5, 0.75), 0.25, 0.2
BEHIND, UNDER = "update behind", "update in backward"
FLOAT_BYTES = 4


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
        if self.kind in (BEHIND, UNDER):
            is_asked = self.kind == UNDER and self.ratio <= MOST_FETCHED_RATIO
            hidden = self.longer <= MOST_LEFT * self.ratio or not is_asked
            return hidden and abs(self.off) <= MOST_OFF
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


class WaitingSGD(torch.optim.SGD):
    """Plain steps, which take the host as long as it reads and writes the state of AdamW."""

    seconds_of_element = 0.0

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step."""
        own = (p for group in self.param_groups for p in group["params"] if p.grad is not None)
        time.sleep(self.seconds_of_element * sum(p.numel() for p in own))
        super().step(closure)


def updated(machines: Cluster, steps: int, *, under: bool) -> tuple[float, Lowered]:
    """The median of the seconds of so many steps with their updates on the host."""
    device = Device(machines)
    assert machines.host is not None
    link = HostLink(device, machines.host.down_bytes_per_s)
    ids = torch.zeros(SIZE.samples, SIZE.sequence, dtype=torch.long)
    batch = {"input_ids": ids, "labels": ids}
    with standing_in(device), stand_in("cpu", lambda _: HostStreams(device, link)):
        model: ParallelModel = merakc.auto_parallel(
            build("llama", SIZE), batch, dp=1, tp=1, pp=1, micro_batches=1,
            recompute="none", offload=OPTIMIZER, cluster=machines,
        )  # fmt: skip
        optimizer = WaitingSGD(model.parameters(), lr=1e-6)
        if under:
            merakc.step_in_backward(model, optimizer)
        _over_link(model._own("_steps").sharded.buckets, link)
        seconds = []
        for _ in range(steps + 1):
            device.restart()
            start_s = time.perf_counter()
            model(**batch).loss.backward()
            device.busy_until_s = max(device.busy_until_s, link.free_s[False])
            device.finish()
            optimizer.step()
            optimizer.zero_grad()
            seconds.append(time.perf_counter() - start_s)
            # The first compiles, and tries the optimizer.
            moved_bytes = (2 * (OPTIMIZER_STATES + 1) + 1) * FLOAT_BYTES
            optimizer.seconds_of_element = moved_bytes / machines.host.bytes_per_s
    (step,) = model._own("_steps").compiled.values()
    return statistics.median(seconds[1:]), step.lowered


def _over_link(buckets: list[Bucket], link: HostLink) -> None:
    """Gradients are there once the link has carried them."""
    for bucket in buckets:

        def carried(own: Bucket, _: object, comes: Any = bucket.comes_down) -> None:
            assert own.gradient is not None
            link.copy(own.gradient, own.gradient, back=False)
            if comes is not None:
                comes(own, link.free_s[False])

        bucket.comes_down = carried


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
    yield from update_rows(steps, console)


def update_rows(steps: int, console: Console) -> Iterator[Row]:
    """Every ratio, behind the step and in its backward."""
    bare_s, lowered = updated(_updating(1e15, 1.0), steps, under=False)
    elements = sum(b.numel for b in lowered.buckets[0])
    cells = [(ratio, kind) for ratio in UPDATE_RATIOS for kind in (BEHIND, UNDER)]
    for ratio, kind in tracked(cells, lambda c: "{1}, ratio {0}".format(*c), console):
        machines = _updating(elements, ratio * bare_s)
        step_s, lowered = updated(machines, steps, under=kind == UNDER)
        prediction, _ = predict(lowered, machines)
        (left_s,) = prediction.host_left_s if kind == UNDER else prediction.host_s
        yield Row(
            kind, ratio, 1.0, elements * FLOAT_BYTES, prediction.peak_bytes[0], step_s=step_s,
            simulated_s=prediction.step_s + left_s, without_s=bare_s,
        )  # fmt: skip


def _updating(elements: float, seconds: float) -> Cluster:
    """The machines, whose host takes so long for the update of so many elements, of float32, and
    for the way down; the way up, which no kernel waits for here, none.
    """
    down_bytes, moved_bytes = FLOAT_BYTES, (2 * (OPTIMIZER_STATES + 1) + 1) * FLOAT_BYTES
    down = down_bytes * elements / (DOWN_SHARE * seconds)
    moved = moved_bytes * elements / ((1 - DOWN_SHARE) * seconds)
    host = Host(MEMORY_BYTES, moved, down_bytes_per_s=down, up_bytes_per_s=1e15, source="emulated")
    return replace(MACHINES, host=host)


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
    text = (
        f"half of what is kept and all parameters, for {MOST_LONGER:.0%} of a step at most; "
        f"{1 - MOST_LEFT:.0%} of an update in the backward"
    )
    finish(console, all(r.passed for r in found), text, json_path=json_path, figures=found)


if __name__ == "__main__":
    typer.run(main)
