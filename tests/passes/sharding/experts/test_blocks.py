"""What is a mixture of experts, and what only looks like one."""

from __future__ import annotations

import pytest
import torch

from tests.passes.sharding.experts.mixtures import (
    COPIES,
    EXPERTS,
    B,
    H,
    Part,
    S,
    ends_of,
    graph_of,
    problem_of,
)  # fmt: skip

BLOCKS: dict[str, dict[str, Part]] = {
    "plain": {},
    "sorted back": {"inverse": lambda order: order.argsort()},
    "counted by marks": {
        "ends": lambda ids: torch.nn.functional.one_hot(ids, EXPERTS).sum(0).cumsum(0).int()
    },
    "counted by adding": {
        "ends": lambda ids: (
            torch.zeros(EXPERTS, dtype=torch.long)
            .scatter_add(0, ids, torch.ones_like(ids))
            .cumsum(0)
            .int()
        )
    },
    "counted by bincount": {
        "ends": lambda ids: torch.bincount(ids, minlength=EXPERTS).cumsum(0).int()
    },
    "masked by number": {
        "between": lambda m, made, ids: made.masked_fill((ids >= EXPERTS).unsqueeze(-1), 0.0)
    },
    "halves": {"between": lambda m, made, ids: torch.cat(made.chunk(2, -1)[::-1], -1).relu()},
}
OTHERS: dict[str, dict[str, Part]] = {
    "of the other end first": {"ends": lambda ids: ends_of(EXPERTS - 1 - ids)},
    "no more than a capacity": {
        "ends": lambda ids: torch.histc(ids.float(), EXPERTS, 0, EXPERTS - 1).clamp(max=3)
        .cumsum(0).int()
    },
    "added up in their order": {"behind": lambda made: made.cumsum(0)},
    "weighed by their place": {"behind": lambda made: made * torch.arange(len(made))[:, None]},
    "of all rows": {"between": lambda m, made, ids: made - made.mean(0)},
    "each other's": {"between": lambda m, made, ids: made.flip(0)},
    "not put back": {"inverse": lambda order: order},
    "of another token": {"rows": lambda x, order: x[(order + 1) % len(x)]},
    "tokens behind each other": {"rows": lambda x, order: x[order % len(x)]},
}  # fmt: skip


@pytest.mark.parametrize("name", BLOCKS)
def test_rows_that_are_sorted_by_expert_are_found(name: str) -> None:
    (block,) = problem_of(graph_of(**BLOCKS[name])).experts
    assert len(block.grouped) == 2
    assert [f.size for f in block.tokens] == [B, S]
    problem = problem_of(graph_of(**BLOCKS[name]))
    assert {problem.specs[ref].shape[0] for ref in block.rows} == {B * S * COPIES}


@pytest.mark.parametrize("name", OTHERS)
def test_what_depends_on_other_rows_is_none(name: str) -> None:
    assert not problem_of(graph_of(**OTHERS[name])).experts


def test_a_block_is_on_parts_as_a_whole() -> None:
    problem = problem_of(graph_of(beside=lambda m: m.up.sum() * H))
    (block,) = problem.experts
    _, found = problem.solve(next(f for f in problem.candidates() if f in block.tokens))
    assert found is not None
    assert found.nodes.issuperset(block.nodes)
    assert found.counting == block.counting
