"""Calls that are called tame have gradients that are numbers, also where arguments are zero."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from merakc.frontend.record import record
from merakc.passes.sharding.experts.tame import is_tame
from tests.frontend.small import Small, randn

TAME: list[Callable[[Tensor], Tensor]] = [
    lambda x: F.layer_norm(x, (4,)),
    lambda x: F.rms_norm(x, (4,), eps=1e-6),
    lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
    lambda x: x / (x.abs().sum(-1, keepdim=True) + 1.0),
    lambda x: x.pow(3) / 2,
    lambda x: (x.square() + 1e-3).sqrt(),
]
WILD: list[Callable[[Tensor], Tensor]] = [
    lambda x: F.rms_norm(x, (4,), eps=0.0),
    lambda x: torch.rsqrt(x.pow(2).mean(-1, keepdim=True)),
    lambda x: torch.rsqrt(x + 1e-6),
    lambda x: x / x.abs(),
    lambda x: x.pow(0.5),
    lambda x: x.sqrt(),
    lambda x: x.exp(),
]


def _is_tame(form: Callable[[Tensor], Tensor]) -> bool:
    graph = record(Small(lambda m, x: form(x)), (randn(3, 4),), {}).graph
    return all(is_tame(node, graph.nodes) for node in graph.nodes)


@pytest.mark.parametrize("form", TAME)
def test_tame_calls_have_gradients(form: Callable[[Tensor], Tensor]) -> None:
    assert _is_tame(form)
    for x in (randn(3, 4), torch.zeros(3, 4, dtype=torch.float64)):
        x.requires_grad_()
        form(x).sum().backward()
        assert x.grad is not None
        assert x.grad.isfinite().all()


@pytest.mark.parametrize("form", WILD)
def test_others_are_not(form: Callable[[Tensor], Tensor]) -> None:
    assert not _is_tame(form)
