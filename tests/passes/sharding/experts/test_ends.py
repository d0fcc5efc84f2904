"""Whether groups end where the rows of each expert do."""

from __future__ import annotations

from merakc.ir.graph import Ref
from merakc.passes.sharding.experts.ends import GROUPED, SORTS, ends_where_experts_do
from tests.passes.sharding.experts.mixtures import Part, ends_of, graph_of


def _ends(**parts: Part) -> bool:
    graph = graph_of(**parts)
    (ids,) = [Ref(n.name) for n in graph.nodes if n.op in SORTS]
    product = next(n for n in graph.nodes if n.op == GROUPED)
    return ends_where_experts_do(graph, ids, product.args[2])


def test_ends_are_compared_with_those_of_numbers_at_random() -> None:
    assert _ends()
    assert not _ends(ends=lambda ids: ends_of(ids) - 1)
    assert not _ends(ends=lambda ids: ends_of(ids.clamp(max=1)))
