"""`max` and `min` of what the batch says: one graph, whatever they give."""

from __future__ import annotations

import builtins
from typing import Any

import pytest
import torch
from torch import Tensor

from merakc.errors import RecordError
from merakc.frontend.record import record
from tests.frontend.against_eager import check, inputs_of, run_eager, run_graph, same
from tests.frontend.small import Small, linear, randn

MASK = torch.arange(6) < torch.tensor([6, 3, 5, 2])[:, None]
NONE = torch.zeros_like(MASK)
ONE = torch.arange(24).view(4, 6) == 7


def by_item(y: Tensor, m: Tensor) -> Tensor:
    return (y * m).sum() / max(1, m.sum().item())


def by_float_item(y: Tensor, m: Tensor) -> Tensor:
    return (y * m).sum() / max(m.double().sum().item(), 1) + y.mean() * min(
        2.5, m.mul(2.0).sum().item()
    )


def by_two_floats(y: Tensor, m: Tensor) -> Tensor:
    w = m.float()
    return y.sum() / (1 + max(w[0].mean().item(), w[1].mean().item()))


def by_float_tensor(y: Tensor, m: Tensor) -> Tensor:
    return (y * m).sum() / max(m.double().sum(), 1.0) + y.mean() * min(3, m.double().sum())


def by_tensor(y: Tensor, m: Tensor) -> Tensor:
    return (y * m).sum() / max(m.sum(), 1) + y.mean() * min(3, m.sum())


def by_two_items(y: Tensor, m: Tensor) -> Tensor:
    return y.sum() / (1 + max(m[0].sum().item(), m[1].sum().item()))


FORWARDS = [by_item, by_float_item, by_two_floats, by_float_tensor, by_tensor, by_two_items]


@pytest.mark.parametrize("forward", FORWARDS)
def test_one_graph_for_all_answers(forward: Any) -> None:
    torch.manual_seed(0)
    model = Small(lambda s, x, m: forward(s.layer(x), m), layer=linear())
    x = randn(4, 6)
    recording = check(model, x, MASK, relative=1e-12)
    assert recording.reads is None
    for mask in (NONE, ONE, ~MASK):
        found = run_graph(recording.graph, inputs_of(recording.graph, model, (x, mask), {}))
        same(found, run_eager(model, (x, mask), {}), model, 1e-12)


def test_all_else_is_as_it_was() -> None:
    def forward(s: Any, x: Tensor, m: Tensor) -> Tensor:
        truth = bool(max(1, (m > 0).any()))
        found = [max(1, 2), max([3, 1]), max(2, 0, key=lambda k: -k), min(2, 1, 3), min("b", "a")]
        found += [max([], default=4), truth]
        assert found == [2, 3, 0, 1, "a", 4, True]
        return s.layer(x).sum()

    plain = max, min
    record(Small(forward, layer=linear()), (randn(4, 6), MASK), {})
    assert (builtins.max, builtins.min) == plain


def test_what_parameters_stand_before_is_asked_as_before() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        return s.layer(x).sum() * max(s.layer(x).mean(), 1.0)

    with pytest.raises(RecordError, match="control flow depends on the data"):
        record(Small(forward, layer=linear()), (randn(4, 6),), {})


@pytest.mark.parametrize("item", [True, False])
@pytest.mark.parametrize("name", ["max", "min"])
@pytest.mark.parametrize("bound_first", [True, False])
def test_what_is_no_number_is_compared_as_python_does(
    name: str, bound_first: bool, item: bool
) -> None:
    def forward(s: Any, x: Tensor, w: Tensor) -> Tensor:
        total = w.sum().item() if item else w.sum()
        function = getattr(builtins, name)
        factor = function(1.5, total) if bound_first else function(total, 1.5)
        return s.layer(x).sum() * (w.new_zeros(()) + factor).nan_to_num(7.0)

    model, x = Small(forward, layer=linear()), randn(4, 6)
    recording = record(model, (x, torch.ones(2).double()), {})
    assert recording.reads is None
    for weights in (torch.ones(2), torch.full((2,), float("nan")), -torch.ones(2)):
        given = x, weights.double()
        found = run_graph(recording.graph, inputs_of(recording.graph, model, given, {}))
        same(found, run_eager(model, given, {}), model, 1e-12)
