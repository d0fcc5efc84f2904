"""Layouts of a job, and seconds that none can be below: which are looked at, and when to stop."""

from __future__ import annotations

from dataclasses import dataclass, field

from merakc.costs.device import rank_place
from merakc.costs.ranks import rank_devices
from merakc.costs.stages import piece_cost
from merakc.machines.cluster import Device, Hardware
from merakc.planner.estimate import Degrees
from merakc.planner.piece_table import Form, PieceTable


@dataclass(frozen=True, slots=True)
class Layout:
    """How a job is laid out, before its memory is looked at."""

    degrees: Degrees
    samples: int
    sequence_parallel: bool

    @property
    def batch_size(self) -> int:
        """Samples of a step over all ranks."""
        return self.degrees.dp * self.degrees.micro_batches * self.samples

    @property
    def form(self) -> Form:
        """What its pieces depend on, beside the samples."""
        return self.degrees.tp, self.sequence_parallel


@dataclass
class Bounds:
    """Seconds a sample that no order of work can beat: no stage longer than others, nothing waited
    for.
    """

    table: PieceTable
    hardware: Hardware
    known: dict[tuple[Form, int, Device], tuple[float, list[float]]] = field(default_factory=dict)

    def of(self, layout: Layout) -> float:
        """Of one layout: as if each rank were as much faster than the first as in the piece of
        which that holds most.
        """
        devices = rank_devices(self.hardware, layout.degrees.mesh)
        total_s, seconds = self._seconds(layout, devices[0])
        speeds = {
            device: max(
                (
                    a / b
                    for a, b in zip(seconds, self._seconds(layout, device)[1], strict=True)
                    if b
                ),
                default=1.0,
            )
            for device in dict.fromkeys(devices)
        }
        step_s = layout.degrees.micro_batches * total_s / sum(speeds[device] for device in devices)
        return step_s / layout.batch_size

    def _seconds(self, layout: Layout, device: Device) -> tuple[float, list[float]]:
        """Of a micro-batch on one device, and of each different piece."""
        key = layout.form, layout.samples, device
        if key not in self.known:
            ranks, tp = len(self.hardware.devices), layout.degrees.tp
            place = rank_place(self.hardware, ranks, tp, device=device)
            pieces = self.table.pieces(layout.form, layout.samples)
            costs = {k: piece_cost(p, place) for k, p in {id(p): p for p in pieces}.items()}
            seconds = {k: c.forward_s + c.backward_s for k, c in costs.items()}
            self.known[key] = sum(seconds[id(p)] for p in pieces), list(seconds.values())
        return self.known[key]
