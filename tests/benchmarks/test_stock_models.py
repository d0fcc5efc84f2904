from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from torch import nn
from typer.testing import CliRunner

from benchmarks import stock_models
from benchmarks.models import MODELS
from benchmarks.ranks import RankError, run_ranks
from benchmarks.stock_models import (
    LAYERS,
    Cell,
    cell_text,
    compared,
    cuts,
    document,
    even_batch,
    loss_of,
    measure,
    score,
    train_merakc,
    train_plain,
)


@pytest.mark.parametrize("name", LAYERS)
def test_cuts_are_modules_of_the_model(name: str) -> None:
    modules = dict(MODELS[name].model().named_modules())
    for stages in (2, 3):
        found = cuts(name, stages)
        assert len(found) == stages - 1
        assert all(cut in modules for cut in found)


@pytest.mark.parametrize("name", ["gpt2", "bert", "t5"])
def test_the_loss_is_the_models_own(name: str) -> None:
    case = MODELS[name]
    model, batch = case.model(), even_batch(case, torch.float32)
    assert "attention_mask" not in batch
    assert int(batch["labels"].min()) >= 0
    wanted = model(**batch).loss
    labels = batch.pop("labels")
    torch.testing.assert_close(loss_of(case)(model(**batch), labels), wanted)
    assert isinstance(model, nn.Module)


def test_merakc_is_compared_with_one_process() -> None:
    wanted = train_plain("gpt2", "merakc")
    (got, *_) = run_ranks(2, train_merakc, "gpt2", 2)
    blank = Cell("gpt2", "merakc", 2)
    cell = compared(blank, got, wanted)
    assert cell.right, cell
    assert cell.gradient_error > 0
    off = {name: g * 1.001 for name, g in wanted.gradients[0].items()}
    assert not compared(blank, got, replace(wanted, gradients=(off,))).right


def test_torch_leaves_a_tied_gradient_wrong() -> None:
    cell = measure("gpt2", "torch", 2, train_plain("gpt2", "torch"))
    assert cell.worst == "transformer.wte.weight", cell
    assert cell.loss_error <= 1e-3 < cell.gradient_error


CELLS = [
    Cell("a", "torch", 2, 1e-7, 0.5, "x.weight"),
    Cell("a", "merakc", 2, 0.0, 1e-15),
    Cell("b", "torch", 2, failure="ValueError: no"),
    Cell("b", "merakc", 2, 0.0, 1e-15),
]


def test_says_what_is_wrong_and_why() -> None:
    reasons = ["ValueError: no"]
    assert cell_text(CELLS[0], reasons) == ("[red]gradient of x.weight off by 0.5, loss right[/]")
    assert cell_text(CELLS[2], reasons) == "[red]fails 1[/]"
    assert "loss off by 1e-01" in cell_text(replace(CELLS[0], loss_error=0.1), reasons)
    assert score(CELLS) == [
        "torch: 0 of 2 models train right in all numbers of stages, 1 train wrong without an error",
        "merakc: 2 of 2 models train right in all numbers of stages, 0 train wrong without an "
        "error",
    ]
    page = document(CELLS, reasons, 1.0, [])
    assert "| model | torch, 2 stages | merakc, 2 stages |" in page
    assert "| b | fails 1 | right, 1e-15 |" in page
    assert "1. ValueError: no" in page


@pytest.mark.parametrize("works", [True, False])
def test_exit_status_and_files(
    works: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def ranks(stages: int, function: Any, name: str, *_: Any, **__: Any) -> list[Any]:
        if function is stock_models.train_torch or not works:
            raise RankError(0, "Traceback\nValueError: no such /some/where/x")
        return [train_plain(name, "merakc")]

    monkeypatch.setattr(stock_models, "run_ranks", ranks)
    app = typer.Typer()
    app.command()(stock_models.main)
    arguments = ["--models", "gpt2", "--stages", "2", "--json", str(tmp_path / "found.json")]
    result = CliRunner().invoke(app, [*arguments, "--doc", str(tmp_path / "page.md")])
    assert result.exit_code == (0 if works else 1), result.output
    assert json.loads((tmp_path / "found.json").read_text())["passed"] == works
    assert "1. ValueError: no such x" in (tmp_path / "page.md").read_text()
