"""Which part of a random draw a rank has, as blocks of the array by which it is keyed."""

from __future__ import annotations

import math
from collections.abc import Sequence

from merakc.errors import ShardError
from merakc.ir.graph import Node
from merakc.ir.layout import Layout
from merakc.kernels.draws import KEY_POSITION


def draw_blocks(
    node: Node, own: Layout, tp: int, rank: int
) -> tuple[int, list[tuple[int, int, int]]]:
    """A rank's part of a draw that lies so: the dim of samples, and (size, start, end) of each dim
    of the array by which it is keyed. Raises `ShardError` where the part is no block of it.
    """
    sample, sizes, starts, local = node.args[KEY_POSITION[node.op] + 1 :][:4]
    blocks = [(f.size, *f.bounds(tp, rank)) for dim in own.dims for f in dim]
    return refined(local, sample, blocks, [*zip(sizes, starts, strict=True)])


def refined(
    sizes: tuple[int, ...],
    sample: int,
    blocks: list[tuple[int, int, int]],
    outer: Sequence[tuple[int, int]] = (),
) -> tuple[int, list[tuple[int, int, int]]]:
    """Blocks (size, start, end) of the same array in which dim `sample` of `sizes` is one.

    Where the array is itself a block, `outer` has the size of each dim of the larger one, and where
    it starts there: the result is of that one.
    """
    rest, at = blocks[::-1], -1
    found: list[tuple[int, int, int]] = []
    for k, size in enumerate(sizes):
        if k == sample:
            at = len(found)
        need, first = size, len(found)
        while need > 1:
            full, start, end = rest.pop()
            if full > need:
                (start, end), inner = _outside(full // need, start, end)
                rest.append((full // need, *inner))
                full = need
            assert need % full == 0, (sizes, blocks)
            need //= full
            found.append((full, start, end))
        if k == sample and len(found) != first + 1:
            assert all((start, end) == (0, full) for full, start, end in found[first:])
            found[first:] = [(size, 0, size)]
        if outer and outer[k] != (size, 0):
            found[first:] = _block_of(found[first:], size, *outer[k])
    return at, found


def _block_of(
    blocks: list[tuple[int, int, int]], own: int, size: int, start: int
) -> list[tuple[int, int, int]]:
    """Blocks of a dim of `own` elements, which are those from `start` on of a dim of `size`."""
    (_, first, last), *inner = blocks or [(own, 0, own)]
    each = math.prod(n for n, _, _ in inner)
    if size % each or start % each:
        raise ShardError(
            f"cp and tp cut random draws of {size} numbers where they do not meet: choose degrees "
            "that divide the sequence, or none"
        )
    return [(size // each, start // each + first, start // each + last), *inner]


def _outside(inner: int, start: int, end: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """A range of a dim, as ranges of its outer part and of its inner one, which has that size."""
    first, last = start // inner, (end - 1) // inner
    if start == end:
        return (0, 0), (0, inner)
    if first == last:
        return (first, first + 1), (start - first * inner, end - first * inner)
    if start % inner or end % inner:
        raise ShardError(
            f"tp cuts random draws of {inner} numbers each at {start} and {end}: choose a tp that "
            "divides the samples, or none of them"
        )
    return (first, last + 1), (0, inner)
