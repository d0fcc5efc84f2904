"""A device that only waits: kernels take their modelled seconds, and nothing of the CPU.

On a GPU cluster neither the computing nor the network asks much of the CPU. Where ranks compute on
the cores that also carry their messages, that costs both; here the runtime, its collectives and the
links are real, and only kernels are stood in for. As on a GPU the host runs ahead: a collective
leaves once what it reads would have been computed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch

from merakc.costs.device import place_on
from merakc.costs.nodes import node_seconds
from merakc.costs.work.flops import COLLECTIVES, FREE
from merakc.ir.graph import Graph, Node
from merakc.kernels.ops import BACK, GONE, OUT, REST, STARTED, WAIT
from merakc.machines.cluster import Cluster
from merakc.runtime import codegen

MOVES = (OUT, GONE, REST, BACK)
# A wait that takes longer had something to wait for.
BLOCKED_S = 1e-4


@dataclass(slots=True)
class Device:
    """A device as fast as `machines`, which computes until `busy_until_s` of the clock."""

    machines: Cluster
    busy_until_s: float = 0.0

    def restart(self) -> None:
        """Nothing is computed from now on."""
        self.busy_until_s = time.perf_counter()

    def compute(self, seconds: float, made: Any) -> Any:
        """Takes up a kernel, and hands over what it makes."""
        self.busy_until_s += seconds
        return made

    def finish(self) -> None:
        """Waits until all is computed."""
        left_s = self.busy_until_s - time.perf_counter()
        if left_s > 0:
            time.sleep(left_s)

    def start(self, run: Any, *args: Any, **options: Any) -> Any:
        """Starts a collective of what was taken up; the device goes on."""
        self.finish()
        return run(*args, **options)

    def wait(self, run: Any, *args: Any, **options: Any) -> Any:
        """Waits for a collective, where the device idles if it has nothing else left to do."""
        before_s = time.perf_counter()
        found = run(*args, **options)
        now_s = time.perf_counter()
        if now_s - before_s > BLOCKED_S:
            self.busy_until_s = max(self.busy_until_s, now_s)
        return found

    def wait_until(self, end_s: float) -> None:
        """Idles until a time of the clock, if it has nothing else left to do until then."""
        self.busy_until_s = max(self.busy_until_s, end_s)

    def block(self, run: Any, *args: Any, **options: Any) -> Any:
        """Runs a collective of what was taken up, while the device idles."""
        self.finish()
        return self.wait(run, *args, **options)


class HostLink:
    """A link each way between a device and the memory of its host, which carries a copy at a time,
    at so many bytes a second, from when what is copied would have been computed.
    """

    def __init__(self, device: Device, bytes_per_s: float) -> None:
        self.device, self.bytes_per_s = device, bytes_per_s
        self.free_s = {False: 0.0, True: 0.0}
        self.carried_bytes = 0

    def copy(self, target: torch.Tensor, source: torch.Tensor, back: bool) -> Callable[[], None]:
        """Takes up a copy of nothing; see `merakc.kernels.host.Copy`."""
        begin_s = max(self.free_s[back], self.device.busy_until_s)
        self.free_s[back] = begin_s + source.nbytes / self.bytes_per_s
        self.carried_bytes += source.nbytes
        return partial(self.device.wait_until, self.free_s[back])


class HostStreams:
    """Those of a device that only waits, beside a link; see `merakc.runtime.streams.Streams`."""

    def __init__(self, device: Device, link: HostLink) -> None:
        self.device, self.copy = device, link.copy

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What is aside takes no time but a link's."""
        yield

    def mark(self) -> float:
        """When all is computed that was taken up so far."""
        return self.device.busy_until_s

    def join(self, mark: float) -> None:
        """The device idles until then."""
        self.device.wait_until(mark)

    def wait(self, mark: float) -> None:
        """The host stands still until then."""
        time.sleep(max(0.0, mark - time.perf_counter()))

    def bring(self, tensor: torch.Tensor) -> torch.Tensor:
        """It is there."""
        return tensor


@contextmanager
def standing_in(device: Device) -> Iterator[None]:
    """Graphs that are compiled meanwhile run on the device."""
    with mock.patch.object(codegen, "_Writer", partial(_Waiting, device)):
        yield


class _Waiting(codegen._Writer):
    """Writes calls of the device in place of kernels. What they make are zeros, made once."""

    def __init__(self, device: Device, graph: Graph, *rest: Any) -> None:
        super().__init__(graph, *rest)
        self.stand_in, self.specs = device, graph.specs()

    def _call(self, node: Node) -> str:
        if node.op in COLLECTIVES:
            return self._wrapped(self.stand_in.block, node)
        if node.op in STARTED:
            return self._wrapped(self.stand_in.start, node)
        if node.op == WAIT:
            return self._wrapped(self.stand_in.wait, node)
        if node.op in FREE or node.op in MOVES:
            return super()._call(node)
        made = [None if o is None else torch.zeros(o.shape, dtype=o.dtype) for o in node.outputs]
        seconds = node_seconds(node, self.specs, place_on(self.stand_in.machines, 1))
        name = f"wait{len(self.scope)}"
        whole = made if node.name in self.tuples else made[0]
        self.scope[name] = partial(self.stand_in.compute, seconds, whole)
        return f"{name}()"

    def _wrapped(self, how: Any, node: Node) -> str:
        call = super()._call(node)
        name = call.partition("(")[0]
        self.scope[name] = partial(how, self.scope[name])
        return call
