"""What a choice expects is what the rewritten graphs take."""

from __future__ import annotations

import pytest

from merakc.costs.device import place_on
from merakc.costs.nodes import node_seconds
from merakc.costs.work.memory import order_bytes
from merakc.ir.program import StageGraphs
from merakc.machines.cluster import NOMINAL_CPU
from merakc.passes.recompute.costs import block_costs
from merakc.passes.recompute.segments import recomputed
from merakc.passes.recompute.solve import least_bytes, solve
from tests.passes.recompute.test_segments import BACKWARD, FORWARD, plain

CPU = place_on(NOMINAL_CPU, 1)


def peak_bytes(stage: StageGraphs) -> int:
    forward, backward = order_bytes(stage, (FORWARD, BACKWARD), later=True)
    return max(forward.peak_bytes, forward.held_bytes + backward.peak_bytes)


def seconds(stage: StageGraphs) -> float:
    graphs = [graph for graph in (stage.forward, stage.backward) if graph]
    return sum(node_seconds(node, graph.specs(), CPU) for graph in graphs for node in graph.nodes)


@pytest.mark.parametrize("name", ["gpt2", "llama", "whisper"])
def test_bytes_and_seconds_are_as_expected(name: str) -> None:
    whole = plain(name, 1)
    costs, most = block_costs(whole, CPU), peak_bytes(whole)
    least = least_bytes(costs)
    assert least < 0.7 * most
    for share in (0.1, 0.4, 0.7, 1.0):
        choice = solve(costs, least + int(share * (most - least)))
        assert choice is not None
        made = recomputed(whole, choice.runs)
        assert peak_bytes(made) == pytest.approx(choice.peak_bytes, rel=0.15)
        again_s = seconds(made) - seconds(whole)
        assert again_s == pytest.approx(choice.again_s, abs=0.02 * seconds(whole))
