"""The nodes that bring a value from parts of one dim to parts of another, by all-to-all.

A dim of several factors is opened for it: where ranks have a part of each of several blocks, as of
each tp rank's heads, these are a dim of their own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from merakc.ir.graph import Node, Ref, TensorSpec
from merakc.ir.layout import DimFactor, Layout

RESHAPE, EXCHANGE = "aten.reshape.default", "merakc.exchange.default"
SCATTER = "merakc.scatter.default"
# Between a value and a larger one that repeats it, as keys for several heads of queries do.
REPEATS = frozenset(
    f"aten.{name}.default" for name in ["expand", "clone", "reshape", "view", "unsqueeze"]
)


def before_repeats(ref: Ref, makers: Mapping[str, Node]) -> tuple[Ref, list[Node]]:
    """What a value may be a repetition of, and the calls between, the last one first."""
    chain = list[Node]()
    while (node := makers.get(ref.node)) is not None and node.op in REPEATS:
        chain, ref = [*chain, node], node.args[0]
    return ref, chain


def can_exchange(source: Layout, target: Layout) -> bool:
    """Whether each layout splits one factor of one dim, not both of the same."""
    dims = [_split_dims(lay) for lay in (source, target)]
    once = all(len(found) == 1 for found in dims) and dims[0] != dims[1]
    return once and all(
        sum(f.split for f in lay.dims[dim]) == 1 and not any(f.segments for f in lay.dims[dim])
        for lay, (dim,) in zip((source, target), dims, strict=True)
    )


def exchange_nodes(
    ref: Ref,
    name: str,
    dtype: torch.dtype,
    layouts: tuple[Layout, Layout],
    place: tuple[str, int, int],
) -> list[Node]:
    """Nodes of which the last, `name`, has this rank's part of a value as the second of `layouts`
    says, from `ref`, its part by the first; `place` is an axis, its ranks and the rank's own.
    """
    source, target = layouts
    axis, ranks, rank = place
    ((first,), (second,)) = _split_dims(source), _split_dims(target)
    outer = {first: _before(source.dims[first]), second: _before(target.dims[second])}
    opened = {k: n for k, n in outer.items() if n > 1}
    dims = tuple(k + sum(j <= k for j in opened) for k in (first, second))
    sizes = [
        tuple(len(lay.index(k, ranks, r)) // outer[k] for r in range(ranks))
        for lay, k in ((source, first), (target, second))
    ]
    last = target.local_shape(ranks, rank)
    made: list[tuple[str, tuple[object, ...], tuple[int, ...]]] = []
    if opened:
        shape = _open(source.local_shape(ranks, rank), opened)
        made.append((RESHAPE, (shape,), shape))
    made.append((EXCHANGE, (axis, dims, *sizes, rank), _open(last, opened)))
    if opened:
        made.append((RESHAPE, (last,), last))
    nodes = list[Node]()
    for k, (op, args, shape) in enumerate(made):
        own = name if k == len(made) - 1 else f"{name}.{'opened' if op == RESHAPE else 'parts'}"
        nodes.append(Node(own, op, (ref, *args), (), (TensorSpec(shape, dtype),)))
        ref = Ref(own)
    return nodes


def can_open(lay: Layout, dim: int) -> bool:
    """Whether a dim is split at one factor, which others stand before."""
    splits = [f for f in lay.dims[dim] if f.split]
    return len(splits) == 1 and not splits[0].segments and _before(lay.dims[dim]) > 1


def scatter_nodes(
    ref: Ref, name: str, spec: TensorSpec, lay: Layout, dim: int, place: tuple[str, int, int]
) -> list[Node]:
    """Nodes of which the last, `name`, has this rank's part of a dim of a value: of each block of
    it a part, so that other axes may split the blocks.
    """
    axis, ranks, rank = place
    outer = _before(lay.dims[dim])
    sizes = tuple(len(lay.index(dim, ranks, r)) // outer for r in range(ranks))
    shape = _open(spec.shape, {dim: outer})
    part = (*shape[: dim + 1], sizes[rank], *shape[dim + 2 :])
    local = (*spec.shape[:dim], outer * sizes[rank], *spec.shape[dim + 1 :])
    steps: list[tuple[str, str, tuple[object, ...], tuple[int, ...]]] = [
        (f"{name}.opened", RESHAPE, (shape,), shape),
        (f"{name}.parts", SCATTER, (axis, dim + 1, sizes, rank), part),
        (name, RESHAPE, (local,), local),
    ]
    nodes = list[Node]()
    for own, op, args, made in steps:
        nodes.append(Node(own, op, (ref, *args), (), (TensorSpec(made, spec.dtype),)))
        ref = Ref(own)
    return nodes


def _split_dims(lay: Layout) -> list[int]:
    return [k for k, dim in enumerate(lay.dims) if any(f.split for f in dim)]


def _before(dim: Sequence[DimFactor]) -> int:
    """The elements of a dim outside of its split factor."""
    return math.prod(f.size for f in dim[: next(k for k, f in enumerate(dim) if f.split)])


def _open(shape: Sequence[int], outer: dict[int, int]) -> tuple[int, ...]:
    """The shape with the outer parts of some dims as dims of their own."""
    own = [(outer[k], n // outer[k]) if k in outer else (n,) for k, n in enumerate(shape)]
    return tuple(n for sizes in own for n in sizes)
