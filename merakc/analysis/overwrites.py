"""Which calls of a graph may write their result where an argument was that nothing reads again.

That spares memory, and on a CPU the time that the system takes to hand out new pages. The runtime
compiles these calls so, and predictions of memory count them so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Final

from torch import Tensor

from merakc.analysis.aliases import last_uses
from merakc.ir.graph import Graph, Node, Ref, TensorSpec
from merakc.kernels import gemm
from merakc.kernels.collectives import all_reduce_over
from merakc.kernels.ops import returns_view

SCATTER = "aten.scatter_add.default"
# By op, the arguments that the result may be written over, and what does it: with that argument
# first.
OVERWRITING: Final[Mapping[str, tuple[tuple[int, ...], Callable[..., Tensor]]]] = {
    "aten.add.Tensor": ((0, 1), Tensor.add_),
    "aten.mul.Tensor": ((0, 1), Tensor.mul_),
    "aten.sub.Tensor": ((0,), Tensor.sub_),
    "aten.div.Tensor": ((0,), Tensor.div_),
    "aten.mul.Scalar": ((0,), Tensor.mul_),
    "aten.div.Scalar": ((0,), Tensor.div_),
    "aten.neg.default": ((0,), Tensor.neg_),
    "aten.exp.default": ((0,), Tensor.exp_),
    "aten.masked_fill.Scalar": ((0,), Tensor.masked_fill_),
    SCATTER: ((0,), Tensor.scatter_add_),
    "merakc.all_reduce.default": ((0,), all_reduce_over),
}
# Ops that are none of torch's and keep nothing of what they read.
TRUSTED = {"merakc.all_reduce.default", *gemm.TORCHS}
# Its elements may share memory.
STRIDED = "aten.as_strided.default"


def overwrites(graph: Graph) -> dict[str, int]:
    """The places of the arguments that results are written over, by the names of the nodes.

    Overwritten is what a call of torch's or an all-reduce has made in this graph, of the size of
    the result, and nothing else reads, it or a view of it. What an op that is none of torch's has
    read is left alone: it may have kept it, or may still be communicating it.
    """
    roots, whole = _made_here(graph)
    last = last_uses(graph, roots)
    untrusted = (ref for node in graph.nodes if not _is_trusted(node.op) for ref in node.refs)
    leaving = (*untrusted, *(o.ref for o in graph.outputs))
    pinned = {roots[ref] for ref in leaving if ref in roots}
    specs = graph.specs()
    found: dict[str, int] = {}
    for k, node in enumerate(graph.nodes):
        if node.op not in OVERWRITING or node.kwargs:
            continue
        for place in OVERWRITING[node.op][0]:
            arg = node.args[place]
            if not isinstance(arg, Ref) or arg not in whole or specs[arg] != node.spec:
                continue
            root = roots[arg]
            read = [ref for ref in node.refs if roots.get(ref) == root]
            safe = [arg] * (1 if node.op == SCATTER else len(read))  # others go by each element
            if last[root] == k and root not in pinned and read == safe:
                found[node.name] = place
                break
    return found


@cache
def _is_trusted(op: str) -> bool:
    """Whether it is known to keep nothing of what it reads."""
    return op in TRUSTED or (op.startswith("aten.") and op != STRIDED)


def _made_here(graph: Graph) -> tuple[dict[Ref, Ref], set[Ref]]:
    """In whose memory values live that trusted calls make here, and which of them are all of it."""
    specs = graph.specs()
    roots: dict[Ref, Ref] = {}
    whole: set[Ref] = set()
    for node in graph.nodes:
        if not _is_trusted(node.op):
            continue
        if returns_view(node.op):
            base = node.refs[0] if node.refs else None  # of a number, as `conj` of `1j`
            if base in roots:
                roots.update(dict.fromkeys(node.outs, roots[base]))
                if base in whole and len(node.outputs) == 1 and _same_size(specs[base], node.spec):
                    whole.update(node.outs)
        elif len(node.outputs) == 1 and node.outputs[0] is not None:
            (ref,) = node.outs
            roots[ref] = ref
            whole.add(ref)
    return roots, whole


def _same_size(one: TensorSpec, other: TensorSpec) -> bool:
    return one.dtype == other.dtype and one.numel == other.numel


def overwriting_call(node: Node, place: int) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
    """What computes a node over its argument at `place`, and the arguments for it."""
    args = list(node.args)
    first = args.pop(place)
    return OVERWRITING[node.op][1], (first, *args)
