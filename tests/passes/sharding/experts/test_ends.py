"""Whether groups end where the rows of each expert do."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from merakc.ir.graph import Ref
from merakc.passes.sharding.experts.ends import GROUPED, SORTS, ends_where_experts_do
from tests.passes.sharding.experts.mixtures import EXPERTS, Part, ends_of, graph_of


def _ends(**parts: Part) -> bool:
    graph = graph_of(**parts)
    (ids,) = [Ref(n.name) for n in graph.nodes if n.op in SORTS]
    product = next(n for n in graph.nodes if n.op == GROUPED)
    return ends_where_experts_do(graph, ids, product.args[2])


def test_ends_are_compared_with_those_of_numbers_at_random() -> None:
    assert _ends()
    assert not _ends(ends=lambda ids: ends_of(ids) - 1)
    assert not _ends(ends=lambda ids: ends_of(ids.clamp(max=1)))


def test_numbers_of_no_expert_count_too() -> None:
    """Rows that are dropped have one, of which a histogram knows nothing."""

    def dropped(ids: Tensor, chances: Tensor, number: int) -> Tensor:
        return torch.where(chances.reshape(-1) > 0.3, ids, number)

    def counted(ids: Tensor) -> Tensor:
        return (ids[:, None] <= torch.arange(EXPERTS)).sum(0).int()

    below, above = partial(dropped, number=-1), partial(dropped, number=EXPERTS)
    assert not _ends(numbers=below)
    assert _ends(numbers=below, ends=counted)
    assert _ends(numbers=above, ends=counted)
    assert _ends(numbers=lambda ids, _: ids.int())
    assert not _ends(numbers=lambda ids, _: ids.to(torch.int8).long())  # it might not hold them
