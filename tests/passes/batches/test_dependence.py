"""Which elements depend on those of one sample."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from merakc.passes.batches.dependence import Dependence, otherwise

X = torch.tensor([[1.0, -2.0], [3.0, 4.0], [-5.0, 6.0]])
IDS = torch.tensor([2, 0, 1])
OWN, NONE, ALL = [True, False, False], [False] * 3, [True] * 3


def added(x: Tensor) -> Tensor:
    (rows,) = torch.where(x[:, 0] > 0)
    return torch.zeros_like(x).index_add_(0, rows, x[rows] * 2)


def put(x: Tensor) -> Tensor:
    out = x.clone()
    out[x > 0] = x[x > 0] * 2
    return out


def doubled(x: Tensor) -> Tensor:
    x = x.clone()
    view = x[:, 1]
    view *= 2
    return x


CALLS: dict[str, tuple[Callable[[Tensor], Tensor], list[bool]]] = {
    "its own": (lambda x: x.exp() + 1, OWN),
    "a view that is written to": (doubled, OWN),
    "of each row": (lambda x: x.softmax(1) @ torch.ones(2, 2), OWN),
    "a sum": (lambda x: x - x.mean(0), ALL),
    "a bound that none exceeds": (lambda x: torch.where(x.abs().max() > 1e4, x * 0, x), ALL),
    "a limit": (lambda x: x * (100 / x.norm()).clamp(max=1), ALL),
    "in order": (lambda x: x.sort(0).values, ALL),
    "the largest place": (lambda x: x[x[:, :1].argmax(0)].expand(3, 2), ALL),
    "other rows": (lambda x: x.flip(0), OWN[::-1]),
    "of none": (torch.zeros_like, NONE),
    "of chosen rows": (added, OWN),
    "of chosen elements": (put, OWN),
    "a count": (lambda x: x * (x > 0).sum(), ALL),
    "numbers by places": (lambda x: x.gather(1, (x[:, :1] > 0).long()), OWN),
    "a histogram": (lambda x: torch.bincount((x[:, 0] > 0).long(), minlength=3), ALL),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_depends_on_the_first_row(name: str) -> None:
    call, wanted = CALLS[name]
    x, watch = X.clone(), Dependence()
    watch.mark(x, torch.tensor(OWN)[:, None].expand(3, 2))
    with watch:
        out = call(x)
    assert watch.marked(out).view(3, -1).any(1).tolist() == wanted


def test_whole_numbers_are_followed() -> None:
    ids, watch = IDS.clone(), Dependence()
    watch.mark(ids, torch.tensor(OWN))
    with watch:
        rows, five = X[ids], 1 + ((ids == 5).sum() > 2)
    assert watch.marked(rows).any(1).tolist() == OWN
    assert watch.marked(five)


def test_gradients_are_followed() -> None:
    x, watch = X.clone().requires_grad_(), Dependence()
    grad = torch.ones(3, 2)
    watch.mark(grad, torch.tensor(OWN)[:, None].expand(3, 2))
    with watch:
        (apart,) = torch.autograd.grad(x.exp(), x, grad)
        (joined,) = torch.autograd.grad(x.cumsum(0), x, grad.flip(0))
    assert watch.marked(apart).any(1).tolist() == OWN
    assert watch.marked(joined).all()


@pytest.mark.parametrize(
    ("ask", "answers"),
    [
        (lambda x: bool(x.sum() > 0), [True, False]),
        (lambda x: int((x > 0).sum()), [4, 0]),
        (lambda x: x.sum().item(), [7.0, 0.0]),
        (lambda x: torch.equal(x, X), [True, False]),
    ],
)
def test_questions_are_answered_otherwise(ask: Callable[[Tensor], Any], answers: list[Any]) -> None:
    found = []
    for instead in ({}, {0: answers[1]}):
        x, watch = X.clone(), Dependence(instead)
        watch.mark(x, torch.ones(3, 2, dtype=torch.bool))
        with watch:
            found.append(ask(x))
        assert watch.asked == [(answers[0], True)]
    assert found == answers
    assert answers[1] in [*otherwise(answers[0])]
