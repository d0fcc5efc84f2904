"""The demo from end to end on a tiny model; with a stand-in for merakc where it is to fail."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import typer
from torch import nn
from typer.testing import CliRunner

import merakc
from benchmarks import demo
from benchmarks.demo import Settings, largest_difference, plot_losses
from benchmarks.models import Batch
from merakc.ir.plan import GraphId, Plan, StageRun
from merakc.ir.plan_file import PlanFile, Prediction
from merakc.ir.program import ActionKind, CollectiveEvent, Event
from merakc.simulation.held import Peak
from merakc.simulation.simulate import Simulation
from tests.benchmarks.stand_in import StandIn

EVENTS = (Event(0, "0F0", ActionKind.FORWARD, 0.0, 1.0),)
PLAN = Plan(
    model="LlamaForCausalLM",
    dp=1,
    tp=2,
    pp=2,
    batch_size=8,
    micro_batches=4,
    schedule="1f1b",
    recompute="none",
    graph=GraphId("0" * 64, ()),
    stages=(StageRun(0, "a", "b", "model", "model"), StageRun(1, "c", "d", "model", "lm_head")),
    parameters={"lm_head.weight": (1,)},
    splits={},
)


PEAKS = tuple(Peak(static_bytes=size) for size in (1024, 2048, 4096, 8192))


class _DemoStandIn(StandIn):
    """With what the demo shows beside the loss."""

    plan_file = PlanFile(PLAN, Prediction(1.0, 0.0, (1024, 8192)))
    simulation = Simulation(1.0, EVENTS, (1.0,) * 4, 0.0, PEAKS)
    last_events = EVENTS
    last_collectives = (CollectiveEvent(0, "all_reduce", "tp", 8, 0.0, 0.0, 1e-4, 0.0, 1e-4),)

    def record_collectives(self, on: bool = True) -> None: ...

    measured_peak_bytes = 3 * 1024


def _auto_parallel(
    model: nn.Module, batch: Batch, *, micro_batches: int, scale: float = 1.0, **_: Any
) -> StandIn:
    return _DemoStandIn(model, lambda b: b["labels"][:, 1:].numel(), micro_batches, scale)


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    small = functools.partial(Settings, batch_size=8, sequence=16, hidden=80, layers=1)
    monkeypatch.setattr(demo, "Settings", small)


def _run(out: Path) -> tuple[int, str]:
    app = typer.Typer()
    app.command()(demo.main)
    result = CliRunner().invoke(app, ["--out", str(out), "--steps", "2"], env={"COLUMNS": "120"})
    return result.exit_code, f"{result.output}\n{result.exception!r}"


@pytest.mark.usefixtures("_small")
def test_it_agrees_with_one_process_and_writes_its_files(tmp_path: Path) -> None:
    code, output = _run(tmp_path / "out")
    assert code == 0, output
    shown = [line.split("│")[2:4] for line in output.splitlines() if "peak of rank" in line]
    assert len(shown) == 4
    assert all("iB" in figure for row in shown for figure in row)
    assert (tmp_path / "out" / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "out" / "plan.json").read_text())["decisions"]["tp"] == 2
    trace = json.loads((tmp_path / "out" / "timeline.json").read_text())
    names = {e.get("args", {}).get("name") for e in trace["traceEvents"]}
    assert {"simulated", "measured", "rank 0, tp"} <= names


@pytest.mark.usefixtures("_small")
def test_it_fails_where_the_losses_part(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wrong = functools.partial(_auto_parallel, scale=-1.0)
    monkeypatch.setattr(merakc, "auto_parallel", wrong, raising=False)
    code, output = _run(tmp_path)
    assert code == 1, output
    assert "DISAGREE" in output


def test_the_largest_difference_is_relative() -> None:
    assert largest_difference([4.0, 2.5], [4.0, 2.0]) == 0.25


def test_the_model_has_ten_million_parameters() -> None:
    model = demo.build_model(Settings(steps=1))
    assert sum(p.numel() for p in model.parameters()) >= 10_000_000


def test_the_curves_are_drawn(tmp_path: Path) -> None:
    path = tmp_path / "l.svg"
    plot_losses(path, {"one process": [3.0, 2.0, 1.5], "merakc": [3.0, 2.0]})
    text = path.read_text()
    for told in ("Training loss", "step", "loss", "one process", "merakc", "2.0", "3.0"):
        assert f"<!-- {told} -->" in text
