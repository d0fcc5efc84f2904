"""Seconds and bytes of optimizer state that lives on the host: gradients go down a link, the host
updates, and what was updated comes up in the dtype that is computed with.
"""

from __future__ import annotations

from merakc.costs.state import Precision
from merakc.machines.links import Host

FLOAT32 = 4


def moved_seconds(elements: int, precision: Precision, host: Host) -> float:
    """Seconds in which the reduced gradients of so many elements go to the host, it reads them and
    reads and writes its state, and what it has updated comes back; one after the other.
    """
    if not elements:
        return 0.0
    gradient_bytes = elements * max(precision.gradient_bytes, FLOAT32)
    updated_bytes = 2 * elements * precision.optimizer_bytes + gradient_bytes
    return (
        host.down.seconds(gradient_bytes)
        + updated_bytes / host.bytes_per_s
        + host.up.seconds(elements * precision.parameter_bytes)
    )


def host_bytes(elements: int, precision: Precision) -> int:
    """What so many elements take on the host, with the gradients that come down."""
    has_masters = precision.optimizer_bytes != 2 * precision.parameter_bytes  # among its state
    copy_bytes = 0 if has_masters else precision.parameter_bytes
    each = precision.optimizer_bytes + copy_bytes + max(precision.gradient_bytes, FLOAT32)
    return elements * each
