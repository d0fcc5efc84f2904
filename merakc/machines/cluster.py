"""The machines that a plan is made for: devices, how they are linked, and a flat view of both.

`Hardware` is what a cluster file says (`merakc.machines.cluster_files`): kinds of nodes with their
devices, and levels of links. `Cluster` is the flat view that plans are made with: one kind of
device and one kind of link between any two.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, cast, get_args

from pydantic import Field

from merakc.machines.figures import (
    STRICT,
    BytesPerS,
    Count,
    DtypeName,
    FlopsPerS,
    NotNegative,
    Part,
    Points,
    Positive,
    Share,
    Size,
)
from merakc.machines.links import Host, Level, Link


@dataclass(frozen=True, slots=True)
class Profile:
    """What kernels were measured to reach on a device, from small to large ones.

    `products`, of square matrices, and `attention` hold (flops, flops a second) by dtype, `traffic`
    (bytes read and written, bytes a second).
    """

    __pydantic_config__ = STRICT

    products: Mapping[DtypeName, Points] = field(default_factory=dict)
    attention: Mapping[DtypeName, Points] = field(default_factory=dict)
    traffic: Points = ()


@dataclass(frozen=True, slots=True)
class Device:
    """One kind of device: what its maker states, and three constants that say what programs reach.

    Peak rates are those of dense products by dtype; `tf32` is that of 32-bit inputs which the
    device rounds, as torch does where it is told to. `units` are its multiprocessors, over which
    the tiles of a product are spread. Programs reach `product_share` of the peak rate in large
    products and `traffic_share` of the memory bandwidth; a kernel takes the host `launch_s` to
    launch. What a `profile` has measured wins over these.

    Of its memory not all is a program's: `context_bytes` are what the driver and the libraries
    hold, `communicator_bytes` the buffers of one communicator, and of what is left `fragmentation`
    is the part that lies between a program's tensors.
    """

    __pydantic_config__ = STRICT

    name: str
    peak_flops_per_s: Mapping[DtypeName, FlopsPerS] = field(hash=False)
    bytes_per_s: BytesPerS
    memory_bytes: Count
    units: Count = 1
    power_w: NotNegative = 0.0
    product_share: Share = 0.8
    traffic_share: Share = 0.8
    launch_s: NotNegative = 1e-5
    context_bytes: Size = 0
    communicator_bytes: Size = 0
    fragmentation: Annotated[float, Field(ge=0, lt=1)] = 0.0
    source: str = ""
    profile: Profile | None = field(default=None, hash=False)

    def flops_per_s(self, dtype: str) -> float:
        """What large products of this dtype reach; of one that is not listed, the slowest rate."""
        rates = self.peak_flops_per_s
        return rates.get(cast(DtypeName, dtype), min(rates.values())) * self.product_share

    def rounding(self) -> Device:
        """The same, where products of 32-bit inputs are in TF32, if it has that."""
        rates = self.peak_flops_per_s
        fast = rates.get("tf32", rates.get("float32"))
        return replace(self, peak_flops_per_s={**rates, "float32": fast}) if fast else self

    def reserved_bytes(self, communicators: int) -> int:
        """What of its memory a rank's tensors do not get, which calls so many communicators."""
        held = self.context_bytes + communicators * self.communicator_bytes
        left = max(self.memory_bytes - held, 0)
        return self.memory_bytes - int(left * (1.0 - self.fragmentation))


@dataclass(frozen=True, slots=True)
class Sharing:
    """What devices of a node share, so that they slow each other down: cores, or memory.

    `together[k - 1]` is the share of its speed that each of `devices` keeps while k compute. More
    than are listed take turns: they share what those have, as processes share cores.
    """

    together: tuple[Share, ...]
    devices: Count

    @property
    def cores(self) -> int:
        """How many compute at once."""
        return len(self.together)

    def speed(self, busy: float) -> float:
        """The share of its speed that each of so many devices has, between whole numbers too."""
        if busy <= 1:
            return self.together[0]
        if busy >= self.cores:
            return self.together[-1] * self.cores / busy
        below = int(busy)
        part = busy - below
        return (1 - part) * self.together[below - 1] + part * self.together[below]

    def most(self, ranks: int) -> float:
        """What so many devices of a node do together at the most, in those that are alone."""
        return max(busy * self.speed(busy) for busy in range(1, min(ranks, self.devices) + 1))

    def is_short(self, ranks: int) -> bool:
        """Whether so many devices have fewer cores than they are, so that all that they do takes
        turns: nothing is hidden beside anything.
        """
        return self.cores < min(ranks, self.devices)

    def beside(self, ranks: int) -> float:
        """The share of its speed that communication has beside so many devices that compute, where
        it is cores that carry it.
        """
        return min(1.0, max(0.0, self.cores / min(ranks, self.devices) - 1.0))


@dataclass(frozen=True, slots=True)
class Nodes:
    """So many nodes of one kind, each with so many devices.

    `together` says how they slow each other down (`Sharing`); empty, they do not. Without a `host`
    nothing is known of the memory beside the devices, and nothing is moved there.
    """

    __pydantic_config__ = STRICT

    device: Device
    devices: Count
    count: Count = 1
    together: tuple[Share, ...] = ()
    host: Host | None = None


@dataclass(frozen=True, slots=True)
class Factors:
    """What measured steps took, against the formulas: by how much these are multiplied.

    Seconds of forwards, of backwards, of collectives and messages, and of optimizers.
    """

    __pydantic_config__ = STRICT

    forward: Positive = 1.0
    backward: Positive = 1.0
    collectives: Positive = 1.0
    optimizer: Positive = 1.0
    source: str = ""


def slowest_of(devices: Iterable[Device]) -> Device:
    """The first with the lowest peak rate."""
    return min(devices, key=lambda d: max(d.peak_flops_per_s.values()))


@dataclass(frozen=True, slots=True)
class Hardware:
    """Nodes, in the order of their ranks, and the levels of links from the inner to the outer.

    Programs reach `link_share` of the links' bandwidth. `step_error` is how far predicted steps
    were from measured ones on such machines, as a mean share of their time; 0 where none were
    measured. `factors` correct what is computed of all that.
    """

    __pydantic_config__ = STRICT

    name: str
    nodes: tuple[Nodes, ...]
    links: tuple[Level, ...]
    link_share: Share = 0.8
    step_error: NotNegative = 0.0
    overlap: Part = 1.0
    factors: Factors = Factors()

    def beside(self, ranks: int) -> float:
        """The share of their speed that collectives of state have beside so many ranks that
        compute: there may be cores left.
        """
        return self.sharing.beside(ranks) if self.sharing else self.overlap

    @property
    def devices(self) -> tuple[Device, ...]:
        """The device of each rank."""
        return tuple(n.device for n in self.nodes for _ in range(n.count * n.devices))

    @property
    def is_mixed(self) -> bool:
        """Whether its nodes hold different devices."""
        return any(n.device != self.nodes[0].device for n in self.nodes)

    @property
    def slowest(self) -> Device:
        """The kind of device with the lowest peak rate, which all wait for where work is even."""
        return slowest_of(n.device for n in self.nodes)

    @property
    def sharing(self) -> Sharing | None:
        """What the devices of the first kind of nodes share."""
        own = self.nodes[0]
        return Sharing(own.together, own.devices) if own.together else None

    @property
    def host(self) -> Host | None:
        """A device's part of the memory beside it, with all others of its node at work: of the node
        that has least; None where a node says nothing of it.
        """
        found = [n.host.among(n.devices) for n in self.nodes if n.host is not None]
        return min(found, key=lambda h: h.memory_bytes) if len(found) == len(self.nodes) else None

    def rounding(self) -> Hardware:
        """The same devices, where products of 32-bit inputs are in TF32."""
        rounded = (replace(n, device=n.device.rounding()) for n in self.nodes)
        return replace(self, nodes=tuple(rounded))

    def level(self, extent: int) -> Level:
        """The innermost level that joins a block of `extent` neighbouring devices."""
        return next((link for link in self.links if link.devices >= extent), self.links[-1])

    def flat(self, dtype: DtypeName = "bfloat16") -> Cluster:
        """One kind of device and of link: the slowest device, and the outermost link in use."""
        device = self.slowest
        return Cluster(
            self.name,
            device.flops_per_s(dtype),
            device.bytes_per_s * device.traffic_share,
            op_overhead_s=device.launch_s,
            memory_bytes=min(n.device.memory_bytes for n in self.nodes),
            link_latency_s=0.0,
            link_bytes_per_s=1.0,
            hardware=self,
            sharing=self.sharing,
            overlap=self.overlap,
            host=self.host,
        ).joining(len(self.devices))


@dataclass(frozen=True, slots=True)
class Cluster:
    """One kind of device and one kind of link between any two of them.

    `flops_per_s` is what large matrix products reach, `bytes_per_s` the memory bandwidth that
    elementwise ops reach, `op_overhead_s` the time an op takes whatever its size. A message of n
    bytes takes `link_latency_s` + n / `link_bytes_per_s`, an all-reduce moves its bytes twice.
    Where `hardware` is known, stages are timed with its devices and links (`merakc.costs.device`).
    `sharing` is what the devices of a node share. With `symmetric_memory` they read each other's.
    Gathers and reduce-scatters of tp reach `gather_share` of the rate that all-reduces reach.
    Those over dp have the share `overlap` of their speed beside computes. `host` is what a device
    has of the memory beside it.
    """

    name: str
    flops_per_s: float
    bytes_per_s: float
    op_overhead_s: float
    memory_bytes: int
    link_latency_s: float
    link_bytes_per_s: float
    hardware: Hardware | None = None
    sharing: Sharing | None = None
    symmetric_memory: bool = False
    gather_share: float = 1.0
    overlap: Part = 1.0
    host: Host | None = None

    @property
    def link(self) -> Link:
        """What joins any two devices."""
        return Link(self.link_latency_s, self.link_bytes_per_s)

    def hides(self, ranks: int) -> bool:
        """Whether what so many ranks send can run beside what they compute."""
        is_short = self.sharing is not None and self.sharing.is_short(ranks)
        return not is_short and self.described(ranks).overlap > 0.0

    def joining(self, extent: int) -> Cluster:
        """The same with the links that join `extent` neighbouring devices."""
        if self.hardware is None:
            return self
        level, share = self.hardware.level(extent), self.hardware.link_share
        slower = self.hardware.factors.collectives
        return replace(
            self,
            link_latency_s=slower * level.latency_s,
            link_bytes_per_s=share * level.bytes_per_s / level.shared_by / slower,
            symmetric_memory=level.symmetric_memory,
            gather_share=level.gather_share,
        )

    def rounding(self) -> Cluster:
        """The same machines, where products of 32-bit inputs are in TF32."""
        return replace(self, hardware=self.hardware.rounding()) if self.hardware else self

    def with_hardware(self, ranks: int) -> Cluster:
        """The same, described as hardware of so many ranks, by which plans are priced."""
        return self if self.hardware else replace(self, hardware=self.described(ranks))

    def described(self, ranks: int) -> Hardware:
        """Its hardware; where nothing is said of it, one node of `ranks` devices, or nodes of as
        many as share cores.
        """
        if self.hardware is not None:
            return self.hardware
        rates: dict[DtypeName, float] = dict.fromkeys(get_args(DtypeName), self.flops_per_s)
        device = Device(
            self.name, rates, self.bytes_per_s, self.memory_bytes, product_share=1.0,
            traffic_share=1.0, launch_s=self.op_overhead_s,
        )  # fmt: skip
        links = Level(
            "links", ranks, self.link_bytes_per_s, self.link_latency_s,
            symmetric_memory=self.symmetric_memory, gather_share=self.gather_share,
        )  # fmt: skip
        together, each = (self.sharing.together, self.sharing.devices) if self.sharing else ((), 0)
        each = each if each and ranks % each == 0 else ranks
        nodes = Nodes(device, each, ranks // each, together, self.host)
        return Hardware(self.name, (nodes,), (links,), 1.0, overlap=self.overlap)


# What plans are made with where nothing is said of the machines: figures of the right order, the
# same everywhere, so that the same model and degrees give the same plan on every machine, but for
# its memory, and for cores that are fewer than its ranks. Over gloo a gather of 1 MiB on two ranks
# took as long as an all-reduce of it, a reduce-scatter longer: ranks take tensors apart and put
# them together on their own cores.
# Two cores of servers made 81 and 260 GFLOP/s of float32's products, 42 and 58 of float64's.
NOMINAL_CPU = Cluster(
    "a CPU core per rank, gloo",
    1e11,
    1e10,
    op_overhead_s=5e-6,
    memory_bytes=1 << 33,
    link_latency_s=2e-4,
    link_bytes_per_s=1e9,
    gather_share=0.5,
    overlap=0.0,  # the cores that compute carry what is sent
    host=Host(1 << 33, 1e10, 1e10, 1e10, source="nominal"),  # its own memory, a second time
)
# Buffers of a communicator: 688 MB of over two A100 (NCCL, issue 964 of its repository), as many
# as it has channels. Fragmentation is fitted on published runs that did or did not fit: python -m
# benchmarks.fidelity.fits.
COMMUNICATOR_BYTES, FRAGMENTATION = 688_000_000, 0.09
# One H100 SXM (NVIDIA's data sheet: 989 TFLOP/s dense bf16, 3.35 TB/s, 80 GB, 450 GB/s NVLink a
# direction), at half the peak rate of products.
NOMINAL_GPU = Cluster(
    "H100, NVLink",
    4.9e14,
    3.35e12,
    op_overhead_s=5e-6,
    memory_bytes=80 * 10**9,
    link_latency_s=1e-5,
    link_bytes_per_s=4.5e11,
    # As a device of the preset h100 has them.
    overlap=0.364,
    host=Host(256 * 10**9, 61.4e9, 50.4e9, 50.4e9, latency_s=1e-5),
)
