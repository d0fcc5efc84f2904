"""Random losses are of the kinds that they claim, and each verdict is seen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import typer
from torch import nn
from typer.testing import CliRunner

import benchmarks.random_losses as random_losses
import merakc
from benchmarks.loss_cells import Verdict
from benchmarks.random_losses import LEAVES, OPS, Kind, Tree, difference, judge, main, plain_step
from merakc.errors import RecordError

MSE = Tree("mse")
ROOT = Tree("root", (MSE,))


@pytest.mark.parametrize("name", [*OPS, *LEAVES])
def test_every_value_is_of_its_kind(name: str) -> None:
    shapes = {
        Kind.ROWS: (8, 6), Kind.EACH: (8,), Kind.PAIRS: (8, 8), Kind.CLASS: (6,), Kind.LOSS: (),
        Kind.COUNT: (),
    }  # fmt: skip
    simplest = {kind: Tree(next(n for n, (of, _) in LEAVES.items() if of is kind)) for kind in Kind}
    kind, tree = (
        (OPS[name][0], Tree(name, tuple(simplest[of] for of in OPS[name][1])))
        if name in OPS
        else (LEAVES[name][0], Tree(name))
    )
    value: Any = None

    def loss(z: Any, b: Any, p: Any) -> Any:
        nonlocal value
        value = tree(z, b, p)
        return z.sum()

    assert plain_step(loss) is not None  # type: ignore[arg-type]
    assert isinstance(value, int) if kind is Kind.SIZE else value.shape == shapes[kind]


class _Whole(nn.Module):
    """Runs the whole batch at once, as an engine that is right would; `scale` makes it wrong."""

    def __init__(self, model: nn.Module, scale: float) -> None:
        super().__init__()
        self.model, self.scale = model, scale

    def forward(self, **batch: torch.Tensor) -> dict[str, torch.Tensor]:
        loss = self.model(**batch)["loss"]
        return {"loss": loss + (self.scale - 1) * (loss - loss.detach())}

    def full_gradients(self) -> dict[str, torch.Tensor]:
        return {n: p.grad for n, p in self.model.named_parameters() if p.grad is not None}


def _engine(monkeypatch: pytest.MonkeyPatch, scale: float, error: Exception | None = None) -> None:
    def auto_parallel(model: nn.Module, *_: object, **__: object) -> _Whole:
        if error is not None:
            raise error
        return _Whole(model, scale)

    monkeypatch.setattr(merakc, "auto_parallel", auto_parallel)


def test_a_tree_is_equal_wrong_refused_or_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    _engine(monkeypatch, 1.0)
    assert judge(ROOT) == (Verdict.EQUAL, "")
    _engine(monkeypatch, 1 + 1e-7)
    assert (judge(ROOT) or ("", ""))[0] is Verdict.WRONG
    _engine(monkeypatch, 1.0, RecordError("no"))
    assert judge(ROOT) == (Verdict.REFUSED, "RecordError: no")
    _engine(monkeypatch, 1.0, KeyError("lost"))
    assert judge(ROOT) == (Verdict.CRASH, "KeyError: 'lost'")


def test_what_says_nothing_is_left_out() -> None:
    assert judge(Tree("2")) is None, "no gradient"
    constant = Tree("less_mean", (Tree("sum_classes", (Tree("softmax_r", (Tree("z"),)),)),))
    rounding = Tree("sum_of_weights", (constant,))
    assert plain_step(Tree("by_count", (MSE, rounding))) is None, "too large"
    assert judge(Tree("top_2", (Tree("sorted", (constant,)),))) is not None, "small and harmless"
    assert judge(Tree("by_count_clamped", (MSE, rounding))) is not None


def test_a_difference_sees_losses_gradients_and_what_is_missing() -> None:
    one = torch.tensor(1.0, dtype=torch.float64)
    step = one, {"w": 2 * one}
    assert difference(step, step) == 0
    assert difference((1.5 * one, {"w": 2 * one}), step) == 0.25
    assert difference((one, {}), step) == 1
    assert difference((one, {"w": one * torch.nan}), step) == float("inf")


def test_a_tree_tells_how_it_was_made() -> None:
    assert str(Tree("by_count", (ROOT, Tree("mask_sum")))) == "by_count(root(mse), mask_sum)"


@pytest.mark.parametrize("verdict", Verdict)
def test_the_command_counts_and_fails_on_wrong_losses_and_crashes(
    monkeypatch: pytest.MonkeyPatch, verdict: Verdict
) -> None:
    monkeypatch.setattr(random_losses, "judge", lambda _: (verdict, "so"))
    app = typer.Typer()
    app.command()(main)
    result = CliRunner().invoke(app, ["--examples", "5"], env={"COLUMNS": "150"})
    bad = verdict in (Verdict.WRONG, Verdict.CRASH)
    assert result.exit_code == bad, result.output
    assert f"{'FAILED' if bad else 'passed'}: " in result.output
    assert f" {verdict}" in result.output
    assert ("so" in result.output.split()) == (verdict is not Verdict.EQUAL)
