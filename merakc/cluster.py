"""The machines that a plan is made for: rates, memory and links."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cluster:
    """One kind of device and one kind of link between any two of them.

    `flops_per_s` is what large matrix products reach, `bytes_per_s` the memory bandwidth that
    elementwise ops reach, `op_overhead_s` the time an op takes whatever its size. A message of n
    bytes takes `link_latency_s` + n / `link_bytes_per_s`, an all-reduce moves its bytes twice.
    """

    name: str
    flops_per_s: float
    bytes_per_s: float
    op_overhead_s: float
    memory_bytes: int
    link_latency_s: float
    link_bytes_per_s: float


# What plans are made with where nothing is said of the machines: figures of the right order, the
# same everywhere, so that the same model and degrees give the same plan on every machine.
NOMINAL_CPU = Cluster("a CPU core per rank, gloo", 5e10, 1e10, 5e-6, 1 << 33, 2e-4, 1e9)
# One H100 SXM (NVIDIA's data sheet: 989 TFLOP/s dense bf16, 3.35 TB/s, 80 GB, 450 GB/s NVLink a
# direction), at half the peak rate of products.
NOMINAL_GPU = Cluster("H100, NVLink", 4.9e14, 3.35e12, 5e-6, 80 * 10**9, 1e-5, 4.5e11)
