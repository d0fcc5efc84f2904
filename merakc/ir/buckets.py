"""What parameters are gathered and reduced together: buckets, in the order of first use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from merakc.ir.graph import Graph, Input, InputKind, Ref

# Large enough to fill a link, small enough that a bucket's copy does not matter: the size that
# DistributedDataParallel uses.
BUCKET_BYTES = 25 << 20


def parameters_in_order(graph: Graph) -> list[Input]:
    """The parameters that a graph reads, in the order of their first use."""
    parameters = {Ref(i.name): i for i in graph.inputs if i.kind is InputKind.PARAMETER}
    read = [r for node in graph.nodes for r in node.refs]
    read += [o.ref for o in graph.outputs]
    return [parameters[ref] for ref in dict.fromkeys(read) if ref in parameters]


def bucket_names(
    items: Iterable[tuple[str, torch.dtype, int]], bucket_bytes: int = BUCKET_BYTES
) -> Iterator[tuple[str, ...]]:
    """The names of each bucket, from (name, dtype, bytes): of one dtype, and of about that size.

    A tensor that is larger is alone.
    """
    names: list[str] = []
    held_bytes, held_dtype = 0, None
    for name, dtype, size_bytes in items:
        if names and (dtype != held_dtype or held_bytes + size_bytes > bucket_bytes):
            yield tuple(names)
            names, held_bytes = [], 0
        names.append(name)
        held_bytes, held_dtype = held_bytes + size_bytes, dtype
    if names:
        yield tuple(names)
