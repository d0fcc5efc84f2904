"""What one turn of a loop over experts reads, and where it writes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from merakc.kernels.opaque import OPAQUE
from merakc.passes.sharding.experts.turns import NotATurnError, Turn
from tests.passes.sharding.experts.looped import (
    EXPERTS,
    Form,
    Looped,
    added,
    compared,
    graph_of,
    summed,
    written,
)


def _first(form: Form) -> Turn:
    graph = graph_of(form)
    return Turn(next(n for n in graph.nodes if n.op == OPAQUE), graph.specs())


@pytest.mark.parametrize(
    ("form", "along", "dim", "adds", "once"),
    [
        (added, {(1,), (1, 0)}, 1, True, False),
        (compared, {(0,), (0, 1)}, 0, True, False),
        (summed, {(0,), (0, 1)}, 0, True, True),
        (written, {(0,)}, 0, False, False),
    ],
)
def test_what_a_turn_reads_and_writes(
    form: Form, along: set[tuple[int, ...]], dim: int, adds: bool, once: bool
) -> None:
    turn = _first(form)
    assert {read.along for read in turn.reads.values()} == along
    assert (turn.dim, turn.adds, turn.once) == (dim, adds, once)
    assert turn.mask in turn.specs
    assert turn.target is not None
    assert turn.target.node.startswith("zeros_like")
    assert [n.op for n in turn.calls].count("aten.linear.default") == 2
    assert turn.made in turn.rows


def _part(compute: Callable[[Looped, Tensor, Tensor], Tensor]) -> Form:
    def form(m: Looped, x: Tensor, chances: Tensor) -> Tensor:
        return compute(m, x, chances.argmax(-1))

    return form


def _of_two_masks(m: Looped, x: Tensor, chosen: Tensor) -> Tensor:
    (rows,), (others,) = torch.where(chosen == 0), torch.where(chosen <= 0)
    return x.index_add(0, rows, m.experts[0](x[others]))


def _of_the_next(m: Looped, x: Tensor, chosen: Tensor) -> Tensor:
    (rows,) = torch.where(chosen[:-1] == 0)
    return x.index_add(0, rows, m.experts[0](x[rows + 1]))


def _by_their_place(m: Looped, x: Tensor, chosen: Tensor) -> Tensor:
    (rows,) = torch.where(chosen == 0)
    return x.index_add(0, rows, m.experts[0](x[rows]) * rows[:, None])


def _by_columns(m: Looped, x: Tensor, chosen: Tensor) -> Tensor:
    (rows,) = torch.where(chosen[: x.shape[1]] == 0)
    return x.index_add(1, rows, m.experts[0](x[rows]).sum(-1)[None].expand(len(x), -1))


def _halved(m: Looped, x: Tensor, chosen: Tensor) -> Tensor:
    (rows,) = torch.where(chosen == 0)
    return x.index_add(0, rows, m.experts[0](x[rows]), alpha=0.5)


def _unique(m: Looped, x: Tensor, chosen: Tensor) -> Tensor:
    found = torch.unique(chosen)
    return x + m.experts[0](x[found]).sum()


@pytest.mark.parametrize(
    ("compute", "said"),
    [
        (_of_two_masks, "several masks"),
        (_of_the_next, "places of a mask"),
        (_by_their_place, "places of a mask"),
        (_by_columns, "aten."),
        (_halved, "writes to more than rows"),
        (_unique, "_unique2.default gives something else than rows"),
    ],
)
def test_what_is_no_turn(compute: Callable[..., Tensor], said: str) -> None:
    with pytest.raises(NotATurnError, match=said) as error:
        _first(_part(compute))
    assert "test_turns.py:" in error.value.source
    assert EXPERTS == 5
