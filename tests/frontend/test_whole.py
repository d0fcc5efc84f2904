"""Modules that a forward makes are kept whole, as its own are."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import merakc
from merakc.machines.cluster import NOMINAL_CPU
from tests.frontend.against_eager import check
from tests.frontend.small import WIDTH, Small, linear, randn
from tests.frontend.test_opaque import modules


class Order(nn.Module):
    """The places of the least first, by numpy."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.from_numpy(np.argsort(x.detach().numpy()))


class Sorted(nn.Module):
    """The distance from targets, which are positive, each beside the score that comes next."""

    def __init__(self) -> None:
        super().__init__()
        self.order = Order()
        self.weights = nn.Buffer(torch.ones(WIDTH).cumsum(0))

    def forward(self, scores: Tensor, targets: list[Tensor]) -> dict[str, Tensor]:
        if any(bool((t < 0).any()) for t in targets):
            raise ValueError("a target is negative")
        pairs = zip(scores, targets, strict=True)
        each = [(x[self.order(x)] - t).square() @ self.weights.to(x.dtype) for x, t in pairs]
        return {"loss": torch.stack(each).mean()}


def made_loss(s: Any, x: Tensor, targets: Tensor) -> Any:
    """A criterion that the forward makes, given a list with a tensor for each sample."""
    return Sorted()(s.layer(x), list(targets))["loss"]


def test_a_module_that_the_forward_makes_is_one_node_with_all_that_it_calls() -> None:
    model = Small(made_loss, layer=linear())
    forward = Sorted.forward
    assert modules(check(model, randn(4, 6), randn(4, 6).square())) == ["Sorted"]
    assert Sorted.forward is forward


def test_a_loss_that_goes_through_the_samples_is_that_of_the_whole_batch() -> None:
    torch.manual_seed(0)
    model, batch = Small(made_loss, layer=linear()), (randn(8, 6), randn(8, 6).square())
    loss = model(*batch)
    loss.backward()
    wanted = copy.deepcopy(model.layer.weight.grad)
    model.zero_grad()
    with pytest.warns(match="module 'Sorted' cannot be recorded"):
        parallel = merakc.auto_parallel(model, batch, micro_batches=4, cluster=NOMINAL_CPU)
    found = parallel(*batch)
    found.backward()
    assert found.item() == pytest.approx(loss.item(), rel=1e-12)
    torch.testing.assert_close(parallel.layer.weight.grad, wanted, rtol=1e-10, atol=1e-12)
