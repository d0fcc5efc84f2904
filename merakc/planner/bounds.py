"""Seconds that no plan of a strategy can be below: which are looked at, and when to stop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from merakc.costs.device import rank_place, total_flops
from merakc.costs.ranks import rank_devices
from merakc.costs.stages import piece_cost
from merakc.costs.work.pieces import Piece
from merakc.ir.strategy import Form, Strategy
from merakc.machines.cluster import Device, Hardware
from merakc.planner.piece_table import PieceTable


@dataclass
class Bounds:
    """Seconds a sample that no order of work can beat: no stage longer than others, nothing waited
    for.
    """

    table: PieceTable
    hardware: Hardware
    known: dict[tuple[Form, int, Device], tuple[float, list[float]]] = field(default_factory=dict)

    def of(self, strategy: Strategy) -> float:
        """Of one strategy: as if each rank were as much faster than the first as in the piece of
        which that holds most. The last rank's first work waits for forwards on all others.
        """
        devices = rank_devices(self.hardware, strategy.mesh)
        forward_s, seconds = self._seconds(strategy, devices[0])
        speeds = {
            device: max(
                (
                    a / b
                    for a, b in zip(seconds, self._seconds(strategy, device)[1], strict=True)
                    if b
                ),
                default=1.0,
            )
            for device in dict.fromkeys(devices)
        }
        total_s = sum(seconds)
        step_s = strategy.micro_batches * total_s / sum(speeds[device] for device in devices)
        before = (strategy.pp - 1) / strategy.stage_count
        step_s += before * forward_s / max(speeds.values())
        return step_s / strategy.total_batch_size

    def _seconds(self, strategy: Strategy, device: Device) -> tuple[float, list[float]]:
        """Of a micro-batch's forward on one device, and of each piece."""
        key = strategy.form, strategy.samples, device
        if key not in self.known:
            ranks, tp = len(self.hardware.devices), strategy.tp
            place = rank_place(self.hardware, ranks, tp, device=device)
            pieces = self.table.pieces(strategy.form, strategy.samples)
            costs = {k: piece_cost(p, place) for k, p in {id(p): p for p in pieces}.items()}
            each = [costs[id(piece)] for piece in pieces]
            seconds = [cost.forward_s + cost.backward_s for cost in each]
            self.known[key] = sum(cost.forward_s for cost in each), seconds
        return self.known[key]


def flops_of(pieces: Sequence[Piece]) -> int:
    """Those of a micro-batch on one tp rank, forward and backward."""
    flops = {
        key: total_flops(piece.work.forward) + total_flops(piece.work.backward)
        for key, piece in {id(piece): piece for piece in pieces}.items()
    }
    return sum(flops[id(piece)] for piece in pieces)
