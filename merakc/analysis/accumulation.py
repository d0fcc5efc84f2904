"""Which gradients of parameters calls may add to what earlier micro-batches have left.

A product adds to a total as fast as it writes a result, and the gradient of a table has few rows
that are not zero. So neither is made by itself and added then: that spares the memory of one
micro-batch's gradients, and reading and writing all of them again. Megatron-LM does so for the
products (its option `gradient_accumulation_fusion`). oneDNN's products cannot; they are made and
added in blocks. The runtime compiles these calls so, and predictions of memory count them so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from merakc.ir.graph import Graph, Node, OutputKind, Ref
from merakc.kernels.gemm import BLOCK_BYTES, add_mm
from merakc.kernels.scores import add_scores_backward

Total = Tensor | None
TABLE: Final = "aten.embedding_dense_backward.default"
ONEDNN: Final = "merakc.mm.default"
SCORES: Final = "merakc.scores_backward.default"


def _add_product(total: Total, is_there: bool, left: Tensor, right: Tensor) -> Tensor:
    if is_there:
        assert total is not None
        return total.addmm_(left, right)
    return torch.mm(left, right, out=total)


def _add_products(total: Total, is_there: bool, left: Tensor, right: Tensor) -> Tensor:
    if is_there:
        assert total is not None
        return total.baddbmm_(left, right)
    return torch.bmm(left, right, out=total)


def _add_rows(
    total: Total, is_there: bool, rows: Tensor, indices: Tensor, count: int, padding: int, *_: bool
) -> Tensor:
    if total is None:
        total = rows.new_zeros(count, rows.shape[-1])
    elif not is_there:
        total.zero_()
    if padding >= 0:
        rows = rows.masked_fill((indices == padding).unsqueeze(-1), 0)
    rows = rows.reshape(-1, rows.shape[-1])
    # index_add_ adds in any order on a GPU.
    return total.index_put_((indices.reshape(-1),), rows, accumulate=True)


# By op, what adds its result, of the same arguments, to a total; or writes it there, where nothing
# is there yet; or to memory of its own, where there is no total.
ADDING: Final[Mapping[str, Callable[..., Any]]] = {
    "aten.mm.default": _add_product,
    "aten.bmm.default": _add_products,
    TABLE: _add_rows,
    ONEDNN: add_mm,
    SCORES: add_scores_backward,  # of its results the first, that of the weights
}


def accumulated(graph: Graph, names: Collection[str], *, fused: bool = False) -> dict[str, str]:
    """Of the outputs of these names, those that their calls may add up, with the calls' nodes.

    They are gradients that nothing else reads; where runs of torch's calls are to be `fused`,
    those of other calls alone.
    """
    read = Counter(r for n in graph.nodes for r in n.refs) + Counter(o.ref for o in graph.outputs)
    alone = {
        Ref(n.name) for n in graph.nodes
        if n.op in ADDING and read[Ref(n.name)] == 1 and not _counts(n.op, n.args)
        and not (fused and n.op.startswith("aten."))
    }  # fmt: skip
    return {
        o.name: o.ref.node
        for o in graph.outputs
        if o.kind is OutputKind.GRADIENT and o.name in names and o.ref in alone
    }


def added_at_once(node: Node) -> int:
    """The bytes that a call makes of its result before it adds them to a total."""
    return min(node.spec.size_bytes, BLOCK_BYTES) if node.op == ONEDNN else 0


def _counts(op: str, args: tuple[Any, ...]) -> bool:
    """Whether it is divided by how often each row was looked up."""
    return op == TABLE and bool(args[4])
