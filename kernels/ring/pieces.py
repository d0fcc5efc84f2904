"""Which rows of a sequence a rank has, and which of them attend to which.

Each rank has a block of rows. Under a causal mask the last rows attend to most keys, and the first
to few: ranks i and n - 1 - i therefore swap the second halves of their blocks, so that each has an
early piece and a late one, and all have as much to do at each step of a ring (as zigzag, or striped
attention, arXiv 2311.09431, with rows that stay where they are outside of the attention).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Piece(NamedTuple):
    """Rows that follow each other in the sequence."""

    start: int
    rows: int


class Call(NamedTuple):
    """Rows of a rank's queries, from and to, and of the keys that a rank has, which see each other
    all, or, where `causal`, each row of the first as many of the others as come before it.
    """

    queries: tuple[int, int]
    keys: tuple[int, int]
    causal: bool


def halves(rows: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of blocks of so many rows, the rows that stay and those that are swapped."""
    return tuple(n - n // 2 for n in rows), tuple(n // 2 for n in rows)


def pieces(rows: Sequence[int], rank: int, *, swapped: bool) -> list[Piece]:
    """The rows that a rank has, in their order there, where rank k has a block of `rows[k]`."""
    starts = [sum(rows[:k]) for k in range(len(rows))]
    other = len(rows) - 1 - rank
    if not swapped or other == rank:
        return [Piece(starts[rank], rows[rank])]
    stay, go = halves(rows)
    return [Piece(starts[rank], stay[rank]), Piece(starts[other] + stay[other], go[other])]


def count_of(own: Sequence[Piece]) -> int:
    """How many rows pieces have together."""
    return sum(piece.rows for piece in own)


def calls(own: Sequence[Piece], keys: Sequence[Piece], *, causal: bool) -> list[Call]:
    """The attentions of the rows `own` to the rows `keys`: pieces of the two are the same, or
    apart. Pieces that see as much are one call, and those that see nothing none.
    """
    if not causal:
        whole = Call((0, count_of(own)), (0, count_of(keys)), causal=False)
        return [whole] if count_of(own) and count_of(keys) else []
    found, at = list[Call](), 0
    for piece in own:
        rows, first = (at, at + piece.rows), 0
        at += piece.rows
        for other in keys:
            seen, first = (first, first + other.rows), first + other.rows
            if not piece.rows or not other.rows or other.start > piece.start:
                continue
            if other.start == piece.start:
                found.append(Call(rows, seen, causal=True))
            else:
                _add(found, Call(rows, seen, causal=False))
    return _joined(found)


def _add(found: list[Call], call: Call) -> None:
    """Adds a call, to the last one of the same queries where its keys stand beside those."""
    last = found[-1] if found else None
    if last and not last.causal and (last.queries, last.keys[1]) == (call.queries, call.keys[0]):
        found[-1] = call._replace(keys=(last.keys[0], call.keys[1]))
    else:
        found.append(call)


def _joined(found: Sequence[Call]) -> list[Call]:
    """The calls, those of queries beside each other to the same keys in one."""
    joined = list[Call]()
    for call in found:
        last = joined[-1] if joined else None
        alike = last and (last.keys, last.causal) == (call.keys, call.causal)
        if last and alike and not call.causal and last.queries[1] == call.queries[0]:
            joined[-1] = call._replace(queries=(last.queries[0], call.queries[1]))
        else:
            joined.append(call)
    return joined
