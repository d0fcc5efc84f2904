"""The cost model of sharded state against published figures, and the search over the lattice."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from typer import Typer
from typer.testing import CliRunner

from benchmarks import state_model
from benchmarks.state_model import MAX_ERROR, Constants, choose_state, errors, published
from merakc.costs.fabric import Fabric
from merakc.costs.state import DpGroup, Layer, state_cost
from merakc.errors import PlanError
from merakc.ir.state import StateShards, lattice

LAYERS = [Layer(10**9, 0.1, 0.2)] * 4
FAST = DpGroup(64, Fabric(8, 100e9, 40e9, 1e-6, 1e-5))


def test_every_published_row_is_predicted() -> None:
    assert len(published()) == 32
    assert np.abs(errors(Constants())).max() <= MAX_ERROR


def test_the_constants_matter() -> None:
    """The bound is not one that any constants keep."""
    slow = dataclasses.replace(Constants(), network_latency_us=0.0)
    assert np.abs(errors(slow)).max() > MAX_ERROR


def test_the_command(tmp_path: Path) -> None:
    app = Typer()
    app.command()(state_model.main)
    done = CliRunner().invoke(app, ["--json", str(tmp_path / "found.json")])
    assert done.exit_code == 0, done.output
    picks = json.loads((tmp_path / "found.json").read_text())["picks"]
    for found in picks:
        assert found["picked_s"] <= found["published_s"]


def test_with_room_the_least_is_communicated() -> None:
    shards, cost = choose_state(LAYERS, 4, FAST, budget_bytes=10**12)
    for other in lattice(64):
        assert state_cost(LAYERS, 4, other, FAST).step_s >= cost.step_s - 1e-9
    assert shards.parameters == 1


def test_without_room_the_parameters_are_sharded() -> None:
    least = state_cost(LAYERS, 4, StateShards(64, 64, 64), FAST).state_bytes
    assert choose_state(LAYERS, 4, FAST, least)[0] == StateShards(64, 64, 64)
    with pytest.raises(PlanError, match=f"take {least} bytes of each rank.*and {least - 1} are"):
        choose_state(LAYERS, 4, FAST, least - 1)


def test_a_slow_network_keeps_shards_inside_a_node() -> None:
    """AMSP's finding: state that fits a node's ranks is not gathered over the network."""
    slow = DpGroup(64, Fabric(8, 100e9, 4e9, 1e-6, 1e-3), overlap=0.0)
    budget = state_cost(LAYERS, 4, StateShards(8, 8, 8), slow).state_bytes
    shards, _ = choose_state(LAYERS, 4, slow, budget)
    assert shards.parameters in (1, 2, 4, 8)
    assert state_cost(LAYERS, 4, StateShards(64, 64, 64), slow).step_s > 2 * (
        state_cost(LAYERS, 4, shards, slow).step_s
    )
