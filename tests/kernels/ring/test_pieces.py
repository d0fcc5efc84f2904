"""Of all rows and keys, each rank attends to just those that a causal mask lets it see."""

from __future__ import annotations

import pytest
import torch

from merakc.kernels.ring.pieces import Call, Piece, calls, count_of, halves, pieces


def _rows(count: int, ranks: int) -> list[int]:
    return [len(part) for part in torch.arange(count).tensor_split(ranks)]


def _places(own: list[Piece]) -> list[int]:
    return [row for piece in own for row in range(piece.start, piece.start + piece.rows)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_each_row_meets_each_key_that_it_sees_once(ranks: int, swapped: bool, causal: bool) -> None:
    for count in (ranks, 2 * ranks + 1, 4 * ranks):
        rows = _rows(count, ranks)
        own = [pieces(rows, rank, swapped=swapped) for rank in range(ranks)]
        assert sorted(row for some in own for row in _places(some)) == [*range(count)]
        met = torch.zeros(count, count, dtype=torch.int64)
        for mine in own:
            for its in own:
                for call in calls(mine, its, causal=causal):
                    queries = torch.tensor(_places(mine)[slice(*call.queries)])
                    keys = torch.tensor(_places(its)[slice(*call.keys)])
                    seen = torch.ones(len(queries), len(keys), dtype=torch.int64)
                    met[queries[:, None], keys] += seen.tril_() if call.causal else seen
        wanted = torch.ones(count, count, dtype=torch.int64)
        assert torch.equal(met, wanted.tril_() if causal else wanted)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_swapped_rows_have_as_much_to_do_at_each_step(ranks: int) -> None:
    rows = _rows(8 * ranks, ranks)
    for hop in range(1, ranks):
        done = set()
        for rank in range(ranks):
            mine, its = (pieces(rows, k, swapped=True) for k in (rank, (rank - hop) % ranks))
            (call,) = calls(mine, its, causal=True)
            (a, b), (c, d) = call.queries, call.keys
            done.add((b - a) * (d - c))
        assert done == {8 * 8 // 2}


def test_the_rank_in_the_middle_keeps_its_rows() -> None:
    assert pieces([4, 4, 4], 1, swapped=True) == [Piece(4, 4)]
    assert pieces([4, 4, 4], 0, swapped=True) == [Piece(0, 2), Piece(10, 2)]
    assert halves([4, 3, 3]) == ((2, 2, 2), (2, 1, 1))
    assert count_of(pieces([4, 3, 3], 0, swapped=True)) == 3


def test_a_rank_attends_to_its_own_rows_in_three_calls() -> None:
    own = pieces([4, 4], 0, swapped=True)
    assert calls(own, own, causal=True) == [
        Call((0, 2), (0, 2), causal=True),
        Call((2, 4), (0, 2), causal=False),
        Call((2, 4), (2, 4), causal=True),
    ]
