"""Whether the ranks of a model's replica have compiled one step: each makes its own part of it.

Their parts fit each other only where all have recorded the same calls, and have split and cut them
alike. What could differ is a forward that goes by the rank, by time or by chance, an installed
package of another version, and a mistake of ours: no rank may start such a step.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch.distributed as dist

from merakc.errors import MismatchError
from merakc.frontend.python.fingerprint import fingerprint, first_difference
from merakc.ir.graph import Graph
from merakc.ir.program import StageGraphs
from merakc.kernels.collectives import AXES
from merakc.lowering.lowered import Lowered

LOCAL = ("merakc.copy_to.default", "merakc.scatter.default")  # ask for no other rank


def check_alike(
    lowered: Lowered, chunks: Mapping[int, StageGraphs], group: dist.ProcessGroup | None, place: int
) -> None:
    """Raises `MismatchError` on every rank where the ranks of `group`, those of a dp replica, have
    compiled steps that do not fit each other; collective. `place` is this rank's along pp.
    """
    if group is None:
        return
    graph, stages = fingerprint(lowered.loss.graph), lowered.stages
    split = _mark((stages.sharding.told(), sorted(stages.of.items()), stages.transfers))
    calls = [
        _mark(list(_collectives(piece)))
        for _, chunk in sorted(chunks.items())
        for piece in chunk.graphs
    ]
    every: list[Any] = [None] * group.size()
    dist.all_gather_object(every, (graph.hash, split, place, calls), group=group)
    ranks = dist.get_process_group_ranks(group)
    first_of = {own[2]: own for own in reversed(every)}
    for rank, own in zip(ranks, every, strict=True):
        if own[0] != every[0][0]:
            graphs: list[Any] = [None] * group.size()
            dist.all_gather_object(graphs, graph, group=group)
            where = first_difference(graphs[0], graphs[ranks.index(rank)])
            raise MismatchError(
                f"ranks {ranks[0]} and {rank} have recorded different forwards of this batch: "
                f"{where}; a forward must not go by the rank, by time or by chance, and all ranks "
                "must have the same code and packages; where it goes by the order of a set, start "
                "all with one PYTHONHASHSEED, as merakc launch does"
            )
        if own[1] != every[0][1] or own[3] != first_of[own[2]][3]:
            raise MismatchError(
                f"ranks {ranks[0]} and {rank} have split this batch's step otherwise, though they "
                "have recorded the same forward: have all ranks use the same versions of Python, "
                "torch and merakc; where they do, report this as a defect of merakc"
            )


def _collectives(graph: Graph) -> Iterator[tuple[Any, ...]]:
    """The collectives over tp and cp, in their order, but for what is this rank's own: the sizes of
    parts, and not which of them it has.
    """
    for node in graph.nodes:
        at = next((k for k, arg in enumerate(node.args) if arg in AXES), None)
        if at is not None and node.op not in LOCAL:
            outs = [o.dtype for o in node.outputs if o is not None]
            sizes = [x for x in node.args[at + 2 :] if isinstance(x, (list, tuple))]
            yield node.op, node.args[at : at + 2], sizes, outs


def _mark(value: Any) -> int:
    return zlib.crc32(repr(value).encode())
