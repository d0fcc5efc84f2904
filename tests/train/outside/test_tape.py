"""Calls on outputs that are noted, and those that cannot be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from merakc.errors import ConfigError, PlanError, RecordError
from merakc.train.compiled_step import CompiledStep
from tests.battery.small_models import warm_up
from tests.train.outside.small import X, Y, alike, normed

pytestmark = pytest.mark.filterwarnings("ignore:the forward of Normed returns no loss")
HEAD = nn.Linear(3, 3).double()


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    warm_up()


class Doubled(torch.autograd.Function):
    """With a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad * 3


def written_after(x: torch.Tensor) -> None:
    labels = Y.clone()
    loss = F.cross_entropy(x, labels)
    labels.zero_()
    loss.backward()


def written_with_a_view(x: torch.Tensor) -> torch.Tensor:
    doubled = x * 2
    first = doubled[0]
    doubled += 1
    return first


class Own(torch.Tensor):
    """A tensor that nothing can stand in for."""

    def __new__(cls) -> Own:
        return torch.ones(8, 3, dtype=torch.float64).as_subclass(cls)


REFUSED: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "an assignment": (lambda x: x.__setitem__(0, 0.0), "__setitem__ writes into an output"),
    "a call in place": (lambda x: x.mul_(2), "mul_ writes into an output"),
    "one on a view": (lambda x: x[:, :2].mul_(2), "mul_ writes into an output"),
    "one with a view": (written_with_a_view, "add_ writes into .* what shares its memory"),
    "one on a copy by the strides": (
        lambda x: x.t().reshape(-1).mul_(2), "mul_ writes into an output"),
    "one on shared values": (
        lambda x: [y := x.exp(), y.detach().numpy(), y.add_(1)], "add_ writes into an output"),
    "another shape": (lambda x: x.sum(0, keepdim=True).squeeze_(), "squeeze_ writes into"),
    "one on values": (lambda x: x.exp().add_(Own()), "add_ writes into an output"),
    "a draw": (F.dropout, "dropout draws random numbers"),
    "a hook": (lambda x: x.register_hook(lambda g: g), "register_hook of an output"),
    "a kept gradient": (lambda x: x.retain_grad(), "retain_grad of an output"),
    "another module": (HEAD, "linear puts an output of the model together with a tensor that"),
    "a function": (lambda x: Doubled.apply(x).sum(), "custom autograd.Function has returned"),
    "labels that change": (written_after, r"a tensor of shape \[8\] .* was written to"),
    "a function of Python's": (
        lambda x: F.triplet_margin_with_distance_loss(x, x, x, distance_function=F.mse_loss),
        "is given a function",
    ),
}  # fmt: skip


def summed(model: Any) -> tuple[float, ...]:
    logits = model(X)
    loss = F.cross_entropy(logits, Y)
    logged, size = loss.detach().item(), logits.square().mean()
    loss += 0.1 * size
    total = loss
    total /= 4
    loss.backward()
    return logged, loss.item(), total.item(), size.item()


def masked(model: Any) -> float:
    scores = model(X).clone()
    before = scores.sum()
    scores[:, 0] = -5.0
    scores[Y == 1] *= 2
    (F.cross_entropy(scores, Y) + before).backward()
    return scores.sum().item()


@pytest.mark.parametrize("loop", [summed, masked])
def test_what_a_loop_has_made_it_may_write_into(loop: Callable[[Any], Any]) -> None:
    alike(loop)


@pytest.mark.parametrize("name", REFUSED)
def test_calls_that_no_step_would_hear_of(name: str) -> None:
    call, told = REFUSED[name]
    with pytest.raises(ConfigError, match=told):
        call(normed()(X))


def test_the_users_lines_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CompiledStep, "let_go", lambda step, _: step)  # its nodes are looked at
    lines = Path(__file__).read_text().splitlines()
    model = normed(micro_batches=2)
    logits = model(X)
    shifted = logits[4:] - logits[:4]
    with pytest.raises((RecordError, PlanError)) as error:
        shifted.square().mean().backward()  # the line of the error
    told = [str(error.value), *getattr(error.value, "__notes__", ())]
    assert "micro_batches=1" in told[0]
    loss = model(X).square()  # the line of the node
    loss.mean().backward()
    nodes = [*model._own("_steps").compiled.values()][-1].recording.graph.nodes
    found = " ".join([*(n.source for n in nodes), *told])
    for end in ("# the line of the error", "# the line of the node"):
        line = 1 + next(k for k, text in enumerate(lines) if text.endswith(end))
        assert f"test_tape.py:{line}" in found
