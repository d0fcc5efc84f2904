from __future__ import annotations

import time
from functools import partial

import pytest
import torch

from benchmarks.waiting import Device, _Waiting, standing_in
from merakc.costs.device import place_on
from merakc.costs.nodes import node_seconds
from merakc.ir.graph import Graph, Input, InputKind, Node, Output, OutputKind, Ref, TensorSpec
from merakc.kernels.ops import WAIT
from merakc.machines.cluster import NOMINAL_CPU
from merakc.runtime import pieces
from merakc.runtime.codegen import NO_HOOKS

SPEC = TensorSpec((256, 256), torch.float32)


def test_a_kernel_takes_its_modelled_time_and_makes_zeros() -> None:
    node = Node("y", "aten.mm.default", (Ref("x"), Ref("x")), (), (SPEC,))
    view = Node("z", "aten.t.default", (Ref("y"),), (), (SPEC,))
    outputs = (Output("out", OutputKind.RESULT, Ref("z")),)
    graph = Graph((Input("x", InputKind.BATCH, SPEC),), (node, view), outputs)
    device = Device(NOMINAL_CPU)
    with standing_in(device):
        run = pieces.compile_graph(graph, torch.device("cpu"))
    device.restart()
    start_s = device.busy_until_s
    (out,) = run([torch.ones(256, 256)])
    assert out.shape == (256, 256)
    assert not out.any()
    expected_s = node_seconds(node, graph.specs(), place_on(NOMINAL_CPU, 1))
    assert device.busy_until_s - start_s == pytest.approx(expected_s)
    device.finish()
    assert time.perf_counter() - start_s >= expected_s


def test_the_device_computes_while_a_collective_is_on_its_way() -> None:
    device = Device(NOMINAL_CPU)
    device.restart()
    start_s = device.busy_until_s
    device.compute(0.02, None)
    device.start(lambda: None)
    assert time.perf_counter() - start_s >= 0.02  # what it sends is there
    device.compute(0.2, None)
    device.wait(partial(time.sleep, 0.005))  # ends before the device does
    assert device.busy_until_s - start_s == pytest.approx(0.22)
    device.block(partial(time.sleep, 0.02))
    assert device.busy_until_s - start_s >= 0.24


def test_collectives_meet_the_device_in_their_order() -> None:
    nodes = (
        Node("y", "start.all_reduce", (Ref("x"), "tp", "sum"), (), (SPEC,)),
        Node("z", WAIT, (Ref("y"),), (), (SPEC,)),
        Node("u", "merakc.all_reduce.default", (Ref("z"), "tp", "sum"), (), (SPEC,)),
    )
    graph = Graph((Input("x", InputKind.BATCH, SPEC),), nodes, ())
    device = Device(NOMINAL_CPU)
    writer = _Waiting(device, graph, torch.device("cpu"), NO_HOOKS, None)
    writer.source()
    met = [f.func for f in writer.scope.values() if isinstance(f, partial)]
    assert met == [device.start, device.wait, device.block]
