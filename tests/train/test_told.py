"""What is being done is told, and once what is done otherwise than users may expect."""

from __future__ import annotations

import io
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import merakc
from merakc.frontend.regions import WHY
from merakc.ir.batches import PER_MICRO_BATCH, WHOLE_BATCH
from merakc.ir.strategy import Form
from merakc.report.terminal import Terminal
from merakc.train.told import EVERY_S, QUIET, Teller, warn_of


def told(couplings: str, *unheard: str) -> list[str]:
    modules = [
        SimpleNamespace(name="encoder", reason="a loop", source="model.py:3", flops_share=0.5),
        SimpleNamespace(name="", reason=WHY, source="model.py:4", flops_share=0.001),
    ]
    lines = ("BatchNorm over each micro-batch",)
    plan: Any = SimpleNamespace(
        lanes=2, form=Form(2), opaque_modules=modules, couplings=couplings, conventions=lines
    )
    recording: Any = SimpleNamespace(aside=SimpleNamespace(unheard=unheard))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        warn_of(plan, recording)
    return [str(w.message) for w in found]


def test_what_is_told() -> None:
    first, second = told(WHOLE_BATCH, "a line prints, at train.py:7")
    assert "module 'encoder' cannot be recorded and runs as it is" in first
    assert "2 ranks of tp: a loop, at model.py:3. It is 50%" in first
    assert second == "a line prints, at train.py:7"
    assert told(PER_MICRO_BATCH)[1:] == ["by convention: BatchNorm over each micro-batch"]


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).square().mean()


@pytest.mark.parametrize("quiet", ["", "1"])
def test_a_plan_is_told_once(
    quiet: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(QUIET, quiet)
    model = merakc.auto_parallel(Regression(), {"x": torch.randn(6, 4)}, micro_batches=2)
    model(x=torch.randn(6, 4)).backward()
    out, said = capsys.readouterr()
    assert out == ""
    if quiet:
        assert said == ""
        return
    lines = said.splitlines()
    assert lines[0].startswith("merakc: Regression is ready after ")
    assert "  mesh: dp 1 x tp 1 x pp 1 = 1 rank" in lines
    assert "  batch: 6 samples, in 2 micro-batches" in lines
    prediction = model.plan_file.prediction
    assert prediction is not None
    assert any(line.startswith("  predicted: ") and " a step" in line for line in lines)


def test_weights_that_are_made_anew_are_told_of(capsys: pytest.CaptureFixture[str]) -> None:
    with torch.device("meta"):
        model = Regression()
    merakc.auto_parallel(model, {"x": torch.randn(6, 4)}, micro_batches=2, seed=3)
    told = [line for line in capsys.readouterr().err.splitlines() if "weights: " in line]
    assert told == [
        "  weights: 2 tensors of the meta device made anew by the model's own initialisation, "
        "with seed 3"
    ]


def test_without_a_terminal_a_line_comes_every_few_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    written = io.StringIO()
    teller = Teller(Terminal(file=written))
    for waited_s, detail in ((1.0, "one"), (EVERY_S, "two"), (1.0, "three"), (EVERY_S, "four")):
        now_s += waited_s
        teller.begin("choosing a plan")
        teller.tell(detail)
    begun = [line.split(", after ") for line in written.getvalue().splitlines()]
    assert begun == [
        ["merakc: choosing a plan (2 of 4)", "6 s"], ["merakc: choosing a plan (2 of 4)", "12 s"],
    ]  # fmt: skip


def test_the_first_step_is_told_from_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Terminal, "is_terminal", True)
    written = io.StringIO()
    teller = Teller(Terminal(file=written, width=80))
    teller.begin("choosing a plan")
    teller.close()
    assert "merakc: recording the forward (1 of 4) 0:00:00" in written.getvalue()
