"""Random loss graphs in micro-batches: each trains as one process does, or is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, given, settings
from torch import nn

import merakc
from benchmarks.loss_cells import Verdict
from benchmarks.random_losses import (
    LEAVES,
    OPS,
    Kind,
    Tree,
    difference,
    judge,
    plain_step,
    trees,
)
from merakc.errors import RecordError

EXAMPLES = 60
MSE = Tree("mse")
ROOT = Tree("root", (MSE,))


# Shrinking takes minutes; the failing tree is printed, and `benchmarks.random_losses` finds short
# ones. Trees that say nothing (no gradient, ties) are many among the simple ones.
@pytest.mark.filterwarnings("ignore")
@settings(
    max_examples=EXAMPLES,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
@given(trees())
def test_a_random_loss_is_equal_or_refused(tree: Tree) -> None:
    found = judge(tree)
    assume(found is not None)
    assert found is not None
    verdict, reason = found
    assert verdict in (Verdict.EQUAL, Verdict.REFUSED), f"{tree}: {reason}"


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
