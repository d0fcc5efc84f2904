"""Data-parallel ranks whose batches differ in more than the number of samples.

Texts are padded to another length on each rank, say. No one process could hold such a batch; what
the ranks compute is that of one where lengths are in no number: not in what sums are divided by,
nor in what the samples of all ranks meet in. The recordings of the ranks say so: each has one of
the whole batch, in its own lengths.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree

from merakc.batches.split import named_tensors
from merakc.errors import MismatchError
from merakc.ir.batches import BatchSplit, Rows
from merakc.ir.graph import Graph, Node, Ref
from merakc.passes.batches.analyse import Analysis
from merakc.passes.batches.own_rules import COUNTS
from merakc.passes.batches.reader import number_places
from merakc.passes.sharding.rows import Loss, Reduce
from merakc.passes.sharding.rules import row_of

Facts = tuple[tuple[Any, str, str], ...]


def lengths_mark(
    args: Sequence[Any], kwargs: Mapping[str, Any], sampled: Mapping[str, Rows]
) -> int:
    """A hash of all of a batch but the values of its tensors and its number of samples."""
    told = [
        (name, x.dtype, rows.sized(x.shape, 1) if (rows := sampled.get(name)) else tuple(x.shape))
        for name, x in named_tensors(args, kwargs).items()
    ]
    others = [x for x in pytree.tree_leaves((args, kwargs)) if not isinstance(x, torch.Tensor)]
    return zlib.crc32(repr((told, others)).encode())


def facts(found: Analysis, split: BatchSplit) -> Facts:
    """What a step computes with beside the number of samples, with its lines."""
    own = list(_facts(found.whole))
    for head in (split.head, split.known.whole if split.known else None):
        if head is not None:
            own += [(share.spec.shape, share.name, head.source) for share in head.waist]
    return tuple(own)


def check_lengths(own: Facts, group: dist.ProcessGroup | None) -> None:
    """Raises `MismatchError` where the whole batch is another computation on each rank, but for the
    sizes of what it is computed on; collective.
    """
    if group is None:
        return
    every: list[Any] = [None] * group.size()
    dist.all_gather_object(every, own, group=group)
    for rank, other in enumerate(every):
        for mine, theirs in zip(every[0], other, strict=False):
            if mine != theirs:
                raise MismatchError(_told(rank, mine, theirs))
        if len(other) != len(every[0]):
            raise MismatchError(_told(rank, ("another number of calls", "", ""), ("", "", "")))


def _told(rank: int, mine: tuple[Any, str, str], theirs: tuple[Any, str, str]) -> str:
    return (
        f"{mine[2] or theirs[2]}: the batches of data-parallel ranks 0 and {rank} differ in more "
        f"than the number of samples, and what is computed differs with them ({mine[1]} "
        f"{mine[0]} on one, {theirs[1]} {theirs[0]} on the other): give all ranks samples of the "
        "same sizes, padded alike, and the same numbers and flags; or say where samples stand, by "
        "batch_dims"
    )


def _facts(graph: Graph) -> Iterator[tuple[Any, str, str]]:
    """What a recording computes with: calls, numbers, and of how many elements each mean is."""
    specs = graph.specs()
    for node in graph.nodes:
        numbers: tuple[Any, ...] = ()
        if node.op != COUNTS:
            numbers = tuple(
                arg
                for k, arg in enumerate(node.args)
                if k in number_places(node) and not isinstance(arg, Ref)
            )
        if _is_mean(node):
            numbers += (specs[node.refs[0]].numel, node.spec.numel)
        yield numbers, node.op, node.source


def _is_mean(node: Node) -> bool:
    row = row_of(node.op)
    return isinstance(row, Loss) or (isinstance(row, Reduce) and row.combine == "mean")
