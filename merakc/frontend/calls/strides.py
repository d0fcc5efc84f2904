"""`as_strided` by dims: which elements of a tensor it shows, wherever they lie in memory.

A graph says nothing of memory, where a part of a batch, or of a dim split over ranks, lies
otherwise than the whole. What `as_strided` shows is, in most uses, windows along some dims, each of
its strides a number of steps along one of them; that they stay inside the dim is checked, so that
no element of another row is shown.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def by_dims(
    x: Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None
) -> Tensor | None:
    """`x.as_strided(size, stride, offset)` by slices, windows and views of the dims of `x`.

    None where it shows what these cannot: elements outside of `x`, diagonals, or a tensor whose own
    elements share memory.
    """
    wide = [d for d in range(x.dim()) if x.shape[d] > 1]
    order = sorted(wide, key=x.stride, reverse=True)
    groups = [[d] for d in order]
    first = 0 if offset is None else offset - int(x.storage_offset())
    if first < 0 or 0 in size or not _apart(x, order):
        return None
    while True:
        steps = [x.stride(group[-1]) for group in groups]
        starts = _digits(first, steps)
        moves = [_digits(t, steps) if n > 1 else [0] * len(steps)
                 for n, t in zip(size, stride, strict=True)]  # fmt: skip
        if starts is None or any(m is None for m in moves):
            return None
        found = [m for m in moves if m is not None]
        failed = _crossing(x, groups, starts, found, size)
        if failed is None:
            return _shown(x, groups, starts, found, size)
        if failed == 0 or steps[failed - 1] != steps[failed] * _length(x, groups[failed]):
            return None
        groups[failed - 1 : failed + 1] = [groups[failed - 1] + groups[failed]]


def _apart(x: Tensor, order: Sequence[int]) -> bool:
    """Whether no two elements share memory, by dims in the order of their strides."""
    inside = 0
    for d in reversed(order):
        if x.stride(d) <= inside:
            return False
        inside += x.stride(d) * (x.shape[d] - 1)
    return True


def _digits(number: int, steps: Sequence[int]) -> list[int] | None:
    """How many of each of the falling `steps` make a number; None where something is left."""
    found = []
    for step in steps:
        digit, number = divmod(number, step)
        found.append(digit)
    return found if number == 0 else None


def _length(x: Tensor, group: Sequence[int]) -> int:
    length = 1
    for d in group:
        length *= x.shape[d]
    return length


def _crossing(
    x: Tensor,
    groups: Sequence[Sequence[int]],
    starts: Sequence[int],
    moves: Sequence[Sequence[int]],
    size: Sequence[int],
) -> int | None:
    """A group of dims that is left at its end, or along which a stride goes that also goes along
    another; None where there is none.
    """
    for move in moves:
        along = [g for g, step in enumerate(move) if step]
        if len(along) > 1:
            return along[-1]
    for g, group in enumerate(groups):
        last = starts[g] + sum(m[g] * (n - 1) for m, n in zip(moves, size, strict=True))
        if last >= _length(x, group):
            return g
    return None


def _shown(
    x: Tensor,
    groups: Sequence[Sequence[int]],
    starts: Sequence[int],
    moves: Sequence[Sequence[int]],
    size: Sequence[int],
) -> Tensor:
    """The result, where each stride goes along one group of dims and stays inside."""
    ones = [d for d in range(x.dim()) if x.shape[d] <= 1]
    order = [*(d for group in groups for d in group), *ones]
    lengths = [_length(x, group) for group in groups]
    y = x if order == list(range(x.dim())) else x.permute(order)
    y = y if list(y.shape) == lengths else y.reshape(lengths)
    placed: list[int] = []  # the dim of the result that each dim of `y` is
    at = 0
    for g, length in enumerate(lengths):
        own = sorted((k for k, m in enumerate(moves) if m[g]), key=lambda k: -moves[k][g])
        span = 1 + sum(moves[k][g] * (size[k] - 1) for k in own)
        if (starts[g], span) != (0, length):
            y = y.narrow(at, starts[g], span)
        if not own:
            y = y.squeeze(at)
            continue
        for k in own[:-1]:  # windows of all that the others span
            span -= moves[k][g] * (size[k] - 1)
            y = y.unfold(at, span, moves[k][g]).movedim(-1, at + 1)
            at += 1
        if moves[own[-1]][g] > 1:
            y = y[(slice(None),) * at + (slice(None, None, moves[own[-1]][g]),)]
        at += 1
        placed += own
    if placed != sorted(placed):
        y = y.permute([placed.index(k) for k in sorted(placed)])
    for k in range(len(size)):
        if k not in placed:
            y = y.unsqueeze(k)
    # Another tensor in any case: torch takes none for a view of itself.
    return y.expand(list(size)) if y is x or list(y.shape) != list(size) else y
