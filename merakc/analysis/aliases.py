"""Which values of a graph lie in another value's memory, and how long memory is used.

There are two questions. Whether a value *is* taken for a view, `is_view`: what moves data and what
is allocated is counted so. And whether it *may* share memory, `merakc.kernels.ops.returns_view`, by
the schema of the op: what is done in place or taken for one's own must be safe either way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Final

from merakc.ir.graph import Graph, Node, Ref, map_refs, typed
from merakc.kernels.ops import GONE, WAIT, returns_view

# Ops that move no data.
FREE: Final = frozenset(
    {"aten.reshape.default", "aten.view.default", "aten._unsafe_view.default", "aten.t.default",
     "aten.transpose.int", "aten.permute.default", "aten.expand.default", "aten.slice.Tensor",
     "aten.select.int", "aten.unsqueeze.default", "aten.squeeze.dim", "aten.squeeze.dims",
     "aten.split.Tensor", "aten.split_with_sizes.default", "aten.unbind.int",
     "aten.detach.default", "aten.alias.default", "aten.as_strided.default",
     "merakc.copy_to.default", "merakc.divide_gradient.default", WAIT, GONE}
)  # fmt: skip


def is_view(node: Node) -> bool:
    """Whether a node makes no memory of its own."""
    return node.op in FREE and bool(node.refs)


def view_roots(
    graph: Graph, looks_at: Callable[[Node, Ref], bool] = lambda node, _: is_view(node)
) -> dict[Ref, Ref]:
    """What each view of a graph looks at, through all views between.

    `looks_at` says whether a node only looks at what its first argument looks at, which is given.
    """
    found: dict[Ref, Ref] = {}
    for node in graph.nodes:
        root = found.get(node.refs[0], node.refs[0]) if node.refs else None
        if root is not None and looks_at(node, root):
            found.update(dict.fromkeys(node.outs, root))
    return found


def equal_values(graph: Graph) -> dict[Ref, Ref]:
    """What equal calls that come first have made already, by what is made again: programs have
    every call once.
    """
    found: dict[Ref, Ref] = {}
    first: dict[object, Node] = {}
    for node in graph.nodes:
        args, kwargs = map_refs((node.args, node.kwargs), lambda ref: found.get(ref, ref))
        same = first.setdefault((node.op, typed((args, kwargs))), node)
        if same is not node:
            found.update(zip(node.outs, same.outs, strict=True))
    return found


def last_uses(graph: Graph, owner: Mapping[Ref, Ref]) -> dict[Ref, int]:
    """The number of the last node that makes or reads a value in each memory.

    `owner` says in whose memory values lie; those that it does not have are left out.
    """
    found: dict[Ref, int] = {}
    for k, node in enumerate(graph.nodes):
        for ref in (*node.outs, *node.refs):
            if ref in owner:
                found[owner[ref]] = k
    return found


def owned_outputs(graph: Graph) -> frozenset[str]:
    """The outputs in memory of their own: made by a call that returns no view, and no other output
    is the same value or a view of it.
    """
    memory: dict[Ref, Collection[Ref]] = {}  # of views, what they look at
    made: set[Ref] = set()
    for node in graph.nodes:
        if returns_view(node.op):
            shared = set[Ref]().union(*(memory.get(r, (r,)) for r in node.refs))
            memory.update(dict.fromkeys(node.outs, shared))
        else:
            made.update(node.outs)
    times = Counter(ref for o in graph.outputs for ref in memory.get(o.ref, (o.ref,)))
    return frozenset(o.name for o in graph.outputs if o.ref in made and times[o.ref] == 1)
