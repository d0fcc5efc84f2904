"""Mixtures that are written otherwise compute the same in the forms that are looked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import merakc.kernels.experts  # noqa: F401  registers the ops
from merakc.frontend.record import record
from merakc.ir.graph import Graph, InputKind
from merakc.passes.autodiff.interpret import interpret
from merakc.passes.sharding.experts.sorted_forms import with_sorted_forms
from tests.passes.sharding.experts.mixtures import (
    COPIES,
    EXPERTS,
    B,
    H,
    Mixture,
    S,
    graph_of,
    inverse_of,
    problem_of,
)


class Other(Mixture):
    """One whose calls are as `how` says; its loss may read how many rows each expert has."""

    how: str = ""

    def experts(self, x: Tensor) -> Tensor:
        """What the experts of each token make of it, weighed and added up."""
        product = torch.ops.merakc.grouped_mm
        chances, chosen = self.router(x).softmax(-1).topk(COPIES, -1)
        ids = chosen.reshape(-1)
        order = ids.argsort()
        known = ids[order] if self.how == "order alone" else ids.sort()[0]
        counted = ids if self.how in ("unsorted", "first") else known
        counts = torch.histc(counted.float(), EXPERTS, 0, EXPERTS - 1)
        if self.how == "first":  # which depends on their order
            counts = counts + counted[0]
        ends = counts.cumsum(0).int()
        rows = x.index_select(0, order // COPIES)
        made = (product(rows, self.up, ends) + self.bias[known]).tanh()
        back = product(made, self.down, ends)[inverse_of(order)]
        self.read = (counts * chances.mean()).sum() if self.how == "in the loss" else 0.0
        return (back.view(-1, COPIES, H) * chances[..., None]).sum(1)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """The loss, with what is read of the counts."""
        return super().forward(ids, labels) + self.read


def recorded(how: str) -> Graph:
    model, ids = Other(), torch.zeros(B, S, dtype=torch.long)
    model.how = how
    return record(model, (ids, ids), {}).graph


def results(graph: Graph, given: dict[str, Any]) -> list[Tensor]:
    own = {i.name: given[i.target or i.name] for i in graph.inputs if i.name not in graph.constants}
    return interpret(graph, own)


@pytest.mark.parametrize("how", ["order alone", "unsorted", "in the loss"])
def test_other_forms_are_found_and_compute_the_same(how: str) -> None:
    graph = recorded(how)
    assert not problem_of(graph).experts
    found = with_sorted_forms(graph)
    (block,) = problem_of(found).experts
    assert len(block.grouped) == 2
    torch.manual_seed(1)
    words = torch.randint(16, (B, S))
    given: dict[str, Any] = dict(Other().named_parameters())
    given |= {i.target or i.name: words for i in graph.inputs if i.kind is InputKind.BATCH}
    for one, other in zip(results(graph, given), results(found, given), strict=True):
        assert torch.equal(one, other)


def test_what_depends_on_the_order_of_the_numbers_stays() -> None:
    graph = with_sorted_forms(recorded("first"))
    assert not any(node.name.endswith(".sorted") for node in graph.nodes)
    assert not problem_of(graph).experts


def test_gradients_of_what_is_sorted_pass_as_they_did() -> None:
    """An order that is found without gradients gives its list none, whoever sorts it with them."""

    class Scores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scores = nn.Parameter(torch.randn(4).double())
            self.weights = nn.Parameter(torch.randn(2, 4, 4).double())

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                order = self.scores.argsort()
            ends = torch.tensor([2, 4], dtype=torch.int32)
            rows = torch.ops.merakc.grouped_mm(x[order], self.weights.detach(), ends)
            return (rows.sum(1) * self.scores[order] * self.scores.sort()[0]).sum()

    graph = record(Scores(), (torch.randn(4, 4).double(),), {}).graph
    found = with_sorted_forms(graph)
    model, x = Scores(), torch.randn(4, 4).double()
    given = {"0": x, **dict(model.named_parameters())}
    values = [
        interpret(g, {i.name: given[i.target] for i in g.inputs if i.name not in g.constants})[0]
        for g in (graph, found)
    ]
    assert torch.equal(*values)
    grads = [torch.autograd.grad(value, [model.scores])[0] for value in values]
    torch.testing.assert_close(*grads, rtol=1e-12, atol=0)


def test_a_plain_mixture_stays_as_it_is() -> None:
    graph = graph_of()
    assert with_sorted_forms(graph) == graph
