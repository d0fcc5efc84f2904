"""Seconds and bytes of optimizer state that lives on the host: gradients go down a link, the host
updates, and what was updated comes up in the dtype that is computed with.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from merakc.costs.state import Precision
from merakc.machines.links import Host

FLOAT32 = 4


@dataclass(frozen=True, slots=True)
class HostUpdate:
    """Seconds in which reduced gradients go to the host, it reads them and reads and writes its
    state, and what it has updated comes back.
    """

    down_s: float
    update_s: float
    up_s: float

    @property
    def total_s(self) -> float:
        """One after the other."""
        return self.down_s + self.update_s + self.up_s


def host_update(elements: int, precision: Precision, host: Host) -> HostUpdate:
    """That of so many elements."""
    if not elements:
        return HostUpdate(0.0, 0.0, 0.0)
    gradient_bytes = elements * max(precision.gradient_bytes, FLOAT32)
    updated_bytes = 2 * elements * precision.optimizer_bytes + gradient_bytes
    return HostUpdate(
        host.down.seconds(gradient_bytes),
        updated_bytes / host.bytes_per_s,
        host.up.seconds(elements * precision.parameter_bytes),
    )


def left_seconds(updates: Iterable[tuple[float, HostUpdate]], step_s: float) -> float:
    """Seconds behind a step of which the updates run in the backward, one after the other, each
    from when its gradients have come down. What is updated comes back behind the step.
    """
    done_s = up_s = 0.0
    for down_at_s, own in sorted(updates, key=lambda each: each[0]):
        done_s = max(done_s, down_at_s) + own.update_s
        up_s += own.up_s
    return max(0.0, done_s - step_s) + up_s


def host_bytes(elements: int, precision: Precision) -> int:
    """What so many elements take on the host, with the gradients that come down."""
    has_masters = precision.optimizer_bytes != 2 * precision.parameter_bytes  # among its state
    copy_bytes = 0 if has_masters else precision.parameter_bytes
    each = precision.optimizer_bytes + copy_bytes + max(precision.gradient_bytes, FLOAT32)
    return elements * each
