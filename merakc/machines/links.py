"""What joins devices with each other, and with the memory of their host."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from merakc.machines.figures import STRICT, BytesPerS, Count, Latency, Share


class Link(NamedTuple):
    """What joins two devices: the alpha-beta model (Hockney 1994) of one message."""

    latency_s: float
    bytes_per_s: float

    def seconds(self, size_bytes: float) -> float:
        """Of a message that shares the link with no other."""
        return self.latency_s + size_bytes / self.bytes_per_s


@dataclass(frozen=True, slots=True)
class Level:
    """One level of links: which devices it joins, and how fast.

    It joins blocks of `devices` devices: those of a node, of a rack. `bytes_per_s` is what
    `shared_by` devices together send through it, a direction; `latency_s` what one step of a
    collective waits. Gathers and reduce-scatters of tp reach `gather_share` of the rate that
    all-reduces reach. Through one with `symmetric_memory`, GPUs read each other's memory, so that
    torch pipelines products with collectives (`merakc.kernels.products`).
    """

    __pydantic_config__ = STRICT

    name: str
    devices: Count
    bytes_per_s: BytesPerS
    latency_s: Latency = 0.0
    shared_by: Count = 1
    symmetric_memory: bool = False
    source: str = ""
    gather_share: Share = 1.0


@dataclass(frozen=True, slots=True)
class Host:
    """The memory beside a device that its tensors can be moved to, and the link between the two.

    A device may use `memory_bytes` of it, at `bytes_per_s`: its part of the bandwidth, with which
    optimizers update what lives there. `down_bytes_per_s` is what `shared_by` devices together
    send to the host, `up_bytes_per_s` what they fetch, both at once; a copy takes `latency_s` more.
    """

    __pydantic_config__ = STRICT

    memory_bytes: Count
    bytes_per_s: BytesPerS
    down_bytes_per_s: BytesPerS
    up_bytes_per_s: BytesPerS
    latency_s: Latency = 0.0
    shared_by: Count = 1
    source: str = ""

    def among(self, devices: int) -> Host:
        """What each of so many devices of a node has of it while all copy at once."""
        users = min(self.shared_by, devices)
        return replace(
            self,
            down_bytes_per_s=self.down_bytes_per_s / users,
            up_bytes_per_s=self.up_bytes_per_s / users,
            shared_by=1,
        )

    @property
    def down(self) -> Link:
        """What carries a copy to the host."""
        return Link(self.latency_s, self.down_bytes_per_s)

    @property
    def up(self) -> Link:
        """What carries a copy back."""
        return Link(self.latency_s, self.up_bytes_per_s)
