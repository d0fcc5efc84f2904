"""The rows of a loop in the order of their experts."""

from __future__ import annotations

import torch

import merakc.kernels.experts  # noqa: F401  registers the ops
from merakc.ir.graph import Graph, Output, OutputKind, Ref
from merakc.passes.autodiff.interpret import interpret
from merakc.passes.sharding.experts.loops import with_sorted_loops
from tests.passes.sharding.experts.looped import (
    COPIES,
    EXPERTS,
    WORDS,
    B,
    Form,
    S,
    added,
    graph_of,
    model_of,
    within_capacity,
    without_the_last,
    written,
)


def _values(form: Form, graph: Graph, *names: str) -> list[torch.Tensor]:
    """Values of the loop's nodes, for words at random."""
    every = {n.name.rpartition(".")[2]: n.name for n in graph.nodes}
    outputs = tuple(Output(n, OutputKind.RESULT, Ref(every[n])) for n in names)
    torch.manual_seed(0)
    words, weights = torch.randint(WORDS, (B, S)), dict(model_of(form).named_parameters())
    own = Graph(graph.inputs, graph.nodes, outputs, graph.constants, graph.functions)
    given = {i.name: weights.get(i.target, words) for i in graph.inputs}
    return interpret(own, {k: v for k, v in given.items() if k not in graph.constants})


def test_slots_of_a_row_follow_each_other() -> None:
    graph = with_sorted_loops(graph_of(added))
    experts, ids, ends, tokens = _values(added, graph, "experts", "sort", "ends", "tokens")
    assert experts.shape == ids.shape == (B * S * COPIES,)
    assert experts.view(-1, COPIES).diff().ne(0).all()  # two choices are two experts
    assert torch.equal(ids, experts.sort().values)
    assert torch.equal(ends.long(), torch.bincount(experts, minlength=EXPERTS).cumsum(0))
    assert torch.equal(tokens.bincount(), torch.full((B * S,), COPIES))


def test_rows_without_an_expert_come_last_and_give_nothing() -> None:
    for form in (within_capacity, without_the_last):
        graph = with_sorted_loops(graph_of(form))
        (experts, ends) = _values(form, graph, "experts", "ends")
        count = len(ends)
        assert (experts == count).any()
        assert ends[-1] == (experts < count).sum()
        ops = [n.op for n in graph.nodes]
        assert ops.count("aten.clamp_max.default") == 1


def test_where_each_row_has_an_expert_nothing_is_masked() -> None:
    for form in (added, written):
        ops = {n.op for n in with_sorted_loops(graph_of(form)).nodes}
        assert not ops & {"aten.clamp_max.default", "aten.where.self", "aten.masked_fill.Scalar"}


def test_the_calls_have_the_lines_of_the_loop() -> None:
    graph = with_sorted_loops(graph_of(added))
    assert all("looped.py:" in n.source for n in graph.nodes if n.op.startswith("merakc.grouped"))
