"""What is known of a turn whose place was not hit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from merakc.frontend.record import record
from merakc.frontend.regions import Region
from merakc.kernels.opaque import OPAQUE, find
from tests.frontend.hits.hit_loops import EXPERTS, model_of
from tests.frontend.hits.test_visits import Inside
from tests.frontend.small import WIDTH, randn

# How masks and what was hit are computed of numbers and their one-hot form.
KNOWN: list[tuple[Any, Any]] = [
    (lambda ids, one: one.sum(0) > 0, lambda ids, one, k: one[:, k]),
    (lambda ids, one: one.bool().any(0), lambda ids, one, k: ids == k),
    (lambda ids, one: one.t().sum(-1), lambda ids, one, k: one.unbind(1)[k].bool()),
    (lambda ids, one: one.float().sum(0, keepdim=True).squeeze(0) != 0,
     lambda ids, one, k: (ids == k).unsqueeze(1).any(-1)),
]  # fmt: skip
UNKNOWN: list[tuple[Any, Any]] = [
    (lambda ids, one: (one - 2 * one.flip(0)).sum(0) > 0, lambda ids, one, k: one[:, k]),
    (lambda ids, one: one.sum(0) > 1, lambda ids, one, k: one[:, k]),
    (lambda ids, one: (one * -1).sum(0) > 0, lambda ids, one, k: one[:, k]),
    (lambda ids, one: one.sum(0) > 0, lambda ids, one, k: one[:, (k + 1) % EXPERTS]),
    (lambda ids, one: one.sum(0) > 0, lambda ids, one, k: ids == k + 1),
    (lambda ids, one: one.sum(0) > 0, lambda ids, one, k: ids >= k),
    (lambda ids, one: one.sum(0) > 0, lambda ids, one, k: one[:, k] * one.flip(0)[:, k]),
]


def _form(hit: Any, mask: Any) -> Any:
    def form(m: Any, x: Tensor) -> Tensor:
        ids, out = m.router(x).argmax(-1), torch.zeros_like(x)
        one = F.one_hot(ids, EXPERTS)
        for k in hit(ids, one).nonzero():
            (rows,) = torch.where(mask(ids, one, int(k)))
            out.index_add_(0, rows, m.experts[k](x[rows]))
        return out.square().sum()

    return form


@pytest.mark.parametrize("how", KNOWN)
def test_masks_that_are_nothing_just_where_nothing_was_hit(how: tuple[Any, Any]) -> None:
    graph = record(model_of(_form(*how)), (randn(4, WIDTH),), {}).graph
    calls = [find(n.args[-1]).forward for n in graph.nodes if n.op == OPAQUE]
    assert len(calls) == EXPERTS
    assert all(isinstance(call, Region) and call.skips for call in calls)


@pytest.mark.parametrize("how", UNKNOWN)
def test_masks_of_which_that_is_not_known(how: tuple[Any, Any]) -> None:
    graph = record(Inside(_form(*how)), (randn(4, WIDTH),), {}).graph
    assert [n.module for n in graph.nodes if n.op == OPAQUE] == ["looped"]
