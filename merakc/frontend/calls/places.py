"""Places that calls have chosen: `argmax` and `topk` give none outside of their dim.

So `F.one_hot(scores.argmax(-1), classes)`, which asks whether it can, always can, and
`torch.bincount(places, minlength=classes)` has no more than as many counts.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from merakc.ir.graph import Input, Node, Ref

ALL = "aten.all.default"
COMPARED: Mapping[str, Callable[[int, object], bool]] = {
    f"aten.{name}.Scalar": getattr(operator, name) for name in ("ge", "gt", "le", "lt")
}
# Which output of a call holds places in a dim, the argument that names the dim, and its default.
CHOOSING: Mapping[str, tuple[int, int, int | None]] = {
    "aten.argmax.default": (0, 1, None),
    "aten.argmin.default": (0, 1, None),
    "aten.argsort.default": (0, 1, -1),
    "aten.max.dim": (1, 1, None),
    "aten.min.dim": (1, 1, None),
    "aten.sort.default": (1, 1, -1),
    "aten.topk.default": (1, 2, -1),
}
# Calls that pass their first argument's elements on, or some of them.
PASSING = frozenset(
    f"aten.{name}"
    for name in (
        "alias.default", "clone.default", "detach.default", "expand.default", "permute.default",
        "reshape.default", "select.int", "slice.Tensor", "squeeze.default", "squeeze.dim",
        "t.default", "transpose.int", "unbind.int", "unsqueeze.default",
    )
)  # fmt: skip
SELECTING = ("aten.index.Tensor", "aten.index_select.default", "aten.gather.default",
             "aten.take_along_dim.default")  # fmt: skip
SORTING = ("aten.sort.default", "aten.sort.stable")
CAST = "aten.to.dtype"


def is_certain(ref: Ref, nodes: Sequence[Node], inputs: Sequence[Input]) -> bool:
    """Whether a value says of places that they all are in their dim, or more than that."""
    made = {n.name: n for n in nodes}
    node = made.get(ref.node)
    compared = made.get(node.refs[0].node) if node is not None and node.op == ALL else None
    if compared is None or compared.op not in COMPARED:
        return False
    size = size_of_places(compared.refs[0], made, {i.name: i for i in inputs})
    if size is None or len(compared.args) < 2:
        return False
    compare = COMPARED[compared.op]
    return all(compare(place, compared.args[1]) for place in (0, size - 1))


def counted(places: Tensor, size: int) -> Tensor:
    """How often each of the places 0 to `size` - 1 is there, int64 `[size]`, as `torch.bincount`
    gives it, in a call whose shape does not depend on the values.
    """
    # In the middles of bins, so that no rounding moves one to another; doubles count them exactly.
    return torch.histc(places.double(), size, -0.5, size - 0.5).long()


def size_of_places(ref: Ref, made: Mapping[str, Node], inputs: Mapping[str, Input]) -> int | None:
    """The size of the dim in which a value's elements are places; None of other values."""
    node = made.get(ref.node)
    while node is not None and _passes(node, ref.index):
        ref = node.refs[0]
        node = made.get(ref.node)
    if node is None or node.op not in CHOOSING:
        return None
    output, at, default = CHOOSING[node.op]
    source = node.refs[0]
    before = made.get(source.node)
    spec = before.outputs[source.index] if before is not None else inputs[source.node].spec
    dim = node.args[at] if len(node.args) > at else dict(node.kwargs).get("dim", default)
    if ref.index != output or spec is None or any(not isinstance(n, int) for n in spec.shape):
        return None
    return spec.numel if dim is None else spec.shape[dim]


def _passes(node: Node, index: int) -> bool:
    """Whether an output has elements of the first argument alone."""
    if node.op == CAST:
        return node.args[1] in (torch.int32, torch.int64)
    return node.op in (*PASSING, *SELECTING) or (node.op in SORTING and index == 0)
