from __future__ import annotations

import os
import subprocess

import pytest
import torch

from benchmarks.overlap_steps import Size, measure, simulated
from benchmarks.peers.networks import LOOPBACK, NetworkError, slow_network
from merakc.ir.graph import Graph, Input, InputKind, Node, Ref, TensorSpec
from merakc.kernels.ops import WAIT
from merakc.machines.cluster import NOMINAL_CPU

SMALL = Size(layers=1, hidden=64, sequence=16, samples=4)


def test_all_forms_are_measured_on_the_loopback() -> None:
    runs = measure("gpt2", SMALL, [1, 2], LOOPBACK, NOMINAL_CPU, 1, True)
    assert [run.parts for run in runs] == [0, 1, 2]
    for run in runs:
        assert min(run.step_s, run.without_s, run.alone_s, run.simulated_s, run.bound_s) > 0
        assert run.bound_s <= run.simulated_s * 1.01
    activations = SMALL.samples * SMALL.sequence * SMALL.hidden * 4
    assert runs[0].handed_bytes > 4 * activations  # two sums a layer and direction
    assert runs[2].handed_bytes == pytest.approx(runs[0].handed_bytes, rel=0.01)


def test_ranks_meet_over_links_of_their_own() -> None:
    try:
        with slow_network(2, "100mbit", "72kb") as network:
            runs = measure("llama", SMALL, [2], network, NOMINAL_CPU, 1, False)
    except NetworkError as error:
        pytest.skip(f"no namespaces here: {error}")
    wire_s = 8 * runs[0].handed_bytes / 1e8
    assert runs[0].alone_s > wire_s / 2
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    assert f"merakc-{os.getpid()}" not in listed.stdout


def test_the_simulation_takes_the_measured_times_of_what_it_is_made_of() -> None:
    spec = TensorSpec((64, 64), torch.float32)

    def node(name: str, op: str, *args: object) -> Node:
        return Node(name, op, args, (), (spec,))

    start = node("a", "start.all_reduce", Ref("x"), "tp", "sum")
    negs = [node(f"n{k}", "aten.neg.default", Ref("x")) for k in range(100)]
    graph = Graph(
        (Input("x", InputKind.BATCH, spec),), (start, *negs, node("b", WAIT, Ref("a"))), ()
    )
    assert simulated([graph], 3.0, 1.0) == pytest.approx((3.0, 3.0), rel=1e-2)
    assert simulated([graph], 3.0, 1.0, 0.5) == pytest.approx((3.5, 3.5), rel=1e-2)
    step_s, bound_s = simulated([graph], 1.0, 3.0)
    assert bound_s == pytest.approx(3.0)
    assert step_s == pytest.approx(3.0, rel=0.03)
