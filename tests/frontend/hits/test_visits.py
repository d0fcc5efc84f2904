"""Loops over what was hit are recorded whole, and compute what the loop does, gradients too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from merakc.frontend.record import record
from merakc.frontend.regions import Region
from merakc.kernels.opaque import OPAQUE, find
from merakc.passes.autodiff.interpret import interpret
from merakc.passes.sharding.experts.loops import with_sorted_loops
from merakc.train.unused import doubtful, drop_unused, forget
from tests.frontend.hits.hit_loops import EXPERTS, FORMS, OTHERS, TOKENS, model_of
from tests.frontend.small import WIDTH, randn


class Inside(nn.Module):
    """A module with a loop in it, which can run as it is."""

    def __init__(self, form: Any) -> None:
        super().__init__()
        self.looped = model_of(form)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The loss."""
        loss: torch.Tensor = self.looped(x)
        return loss


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("is_sorted", [False, True])
def test_a_loop_is_recorded_whole(form: Any, is_sorted: bool) -> None:
    model = model_of(form)
    graph = record(model, (randn(TOKENS, WIDTH),), {}).graph
    regions = [find(n.args[-1]).forward for n in graph.nodes if n.op == OPAQUE]
    assert len(regions) == EXPERTS
    assert all(isinstance(region, Region) and region.skips for region in regions)
    if is_sorted:
        graph = with_sorted_loops(graph)
        assert not any(n.op == OPAQUE for n in graph.nodes)
    uses, unhit = doubtful(graph), 0
    assert len(uses) == 2 * EXPERTS
    for seed in range(4):
        torch.manual_seed(seed)
        x = randn(TOKENS, WIDTH)
        model.zero_grad()
        wanted = model(x)
        wanted.backward()
        weights = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
        given = {i.name: weights.get(i.target, x) for i in graph.inputs
                 if i.name not in graph.constants}  # fmt: skip
        forget(uses)
        loss = interpret(graph, given)[0]
        torch.testing.assert_close(loss, wanted, rtol=1e-12, atol=0)
        loss.backward()
        gradients = {n: w.grad for n, w in weights.items() if w.grad is not None}
        drop_unused(gradients, uses, None, torch.device("cpu"))
        plain = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        assert gradients.keys() == plain.keys()
        unhit += len(weights) - 1 - len(plain)
        for name, gradient in plain.items():
            torch.testing.assert_close(gradients[name], gradient, rtol=1e-11, atol=1e-13)
    assert unhit


@pytest.mark.parametrize(("form", "said"), OTHERS)
def test_what_is_not_known_to_leave_all_as_it_is_runs_as_it_is(form: Any, said: str) -> None:
    made = record(Inside(form), (randn(TOKENS, WIDTH),), {}).graph
    (node,) = [n for n in made.nodes if n.op == OPAQUE]
    call = find(node.args[-1])
    assert call.module == "looped"
    assert said in call.reason, call.reason
    assert ".py:" in call.source
