"""What each row of an attention mask sees, where that is one run of columns: told from vectors.

Masks are made by comparing the places of rows with those of columns. Where the values of columns
only rise, what one row sees is found by bisection, so that a mask of n by n costs n log n instead
of n * n.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from merakc.ir.graph import Node, Ref, TensorSpec, map_refs
from merakc.kernels.ops import resolve_op

# What a comparison is with its sides exchanged.
SWAPPED = {"le": "ge", "lt": "gt", "ge": "le", "gt": "lt", "eq": "eq"}
AND, OR = ("bitwise_and", "logical_and"), ("bitwise_or", "logical_or")
NOT = ("bitwise_not", "logical_not")


@dataclass(frozen=True)
class Runs:
    """The columns from `starts` to `ends` of each row, of `columns`; none where these are equal.
    Of shape (rows,), or (1,) where all rows see the same.
    """

    starts: torch.Tensor
    ends: torch.Tensor
    columns: int

    @staticmethod
    def of(starts: torch.Tensor, ends: torch.Tensor, columns: int) -> Runs:
        """Those of which empty ones are written in one way."""
        starts, ends = _alike(starts, ends)
        is_empty = starts >= ends
        return Runs(starts.masked_fill(is_empty, 0), ends.masked_fill(is_empty, 0), columns)

    def both(self, other: Runs) -> Runs:
        """What is seen in both."""
        starts = torch.maximum(self.starts, other.starts)
        return Runs.of(starts, torch.minimum(self.ends, other.ends), self.columns)

    def either(self, other: Runs) -> Runs | None:
        """What is seen in one of two, if that is one run of each row."""
        mine, others = self.starts == self.ends, other.starts == other.ends
        meet = torch.maximum(self.starts, other.starts) <= torch.minimum(self.ends, other.ends)
        if not bool((mine | others | meet).all()):
            return None
        starts = torch.minimum(self.starts, other.starts)
        ends = torch.maximum(self.ends, other.ends)
        starts = torch.where(mine, other.starts, torch.where(others, self.starts, starts))
        ends = torch.where(mine, other.ends, torch.where(others, self.ends, ends))
        return Runs(*_alike(starts, ends), self.columns)

    def others(self) -> Runs | None:
        """What is not seen, if that is one run of each row."""
        if bool(((self.starts > 0) & (self.ends < self.columns)).any()):
            return None
        is_first = self.starts == 0
        starts = torch.where(is_first, self.ends, 0)
        ends = torch.where(is_first, self.columns, self.starts)
        return Runs.of(starts, ends, self.columns)

    def kind(self, rows: int) -> str:
        """Of a mask of so many rows: "none" where all is seen, "causal" where each row sees what is
        not behind it, "" for any other.
        """
        if bool((self.starts == 0).all()):
            if bool((self.ends == self.columns).all()):
                return "none"
            seen = torch.arange(1, rows + 1).clamp(max=self.columns)
            if torch.equal(self.ends.expand(rows), seen):
                return "causal"
        return ""


@dataclass
class RunReader:
    """Reads the runs of a graph's masks, of the first of their outer indices. `whole` gives a value
    that follows from constants, and `is_spread` says whether each element of a result follows from
    those of the arguments at its place.
    """

    nodes: Mapping[str, Node]
    specs: Mapping[Ref, TensorSpec]
    whole: Callable[[Ref], torch.Tensor | None]
    is_spread: Callable[[Node], bool]

    def seen(self, mask: Ref) -> Runs | None:
        """What each row may attend to, by a mask of bools or one of floats; None where it is not
        known to be one run.
        """
        spec, node = self.specs[mask], self.nodes.get(mask.node)
        if spec.dtype == torch.bool:
            return _as_runs(self._read(mask), spec.shape[-1])
        if node is None or not self.is_spread(node):
            return None
        if len(node.refs) == 1:  # an expand, for example
            return self.seen(node.refs[0]) if _is_broadcast(node) else None
        if not node.op.startswith("aten.where.") or not isinstance(node.args[0], Ref):
            return None
        where = _as_runs(self._read(node.args[0]), spec.shape[-1])
        sees, hides = (self._single(arg, spec.dtype) for arg in node.args[1:])
        lowest = torch.finfo(spec.dtype).min / 2
        if where is None or sees is None or hides is None:
            return None
        if sees == 0 and hides <= lowest:
            return where
        return where.others() if hides == 0 and sees <= lowest else None

    def _single(self, arg: Any, dtype: torch.dtype) -> float | None:
        """The one number that all elements of an argument are."""
        if not isinstance(arg, Ref):
            return float(torch.tensor(arg, dtype=dtype))
        found = self._read(arg)
        is_one = isinstance(found, torch.Tensor) and found.numel() == 1
        return float(found.to(dtype)) if is_one else None  # type: ignore[union-attr]

    def _read(self, ref: Ref) -> Runs | torch.Tensor | None:
        """A value as runs, or as a tensor that is the same along rows or along columns, of which it
        has one then; None for any other.
        """
        node = self.nodes.get(ref.node)
        if node is None or not self.is_spread(node):
            value = self.whole(ref)
            return None if value is None else _thin(value)
        if _is_broadcast(node):
            return self._read(node.refs[0])
        read = {r: self._read(r) for r in node.refs}
        if any(value is None for value in read.values()):
            return None
        vectors = {r: v for r, v in read.items() if isinstance(v, torch.Tensor)}
        if len(vectors) == len(read) and 1 in _sizes(*vectors.values()):
            args = map_refs(node.args, vectors.__getitem__)
            kwargs = {k: map_refs(v, vectors.__getitem__) for k, v in node.kwargs}
            return _thin(resolve_op(node.op)(*args, **kwargs))
        return self._combined(node, read)

    def _combined(self, node: Node, read: Mapping[Ref, Any]) -> Runs | None:
        """The runs of a comparison, or of what is put together of others."""
        name, columns = node.op.split(".")[1], node.spec.shape[-1]
        if not node.op.startswith("aten.") or not all(isinstance(arg, Ref) for arg in node.args):
            return None
        own = [read[arg] for arg in node.args]
        if name in SWAPPED and all(isinstance(v, torch.Tensor) for v in own):
            return _compared(name, *own)
        runs = [_as_runs(value, columns) for value in own]
        if name not in AND + OR + NOT or any(one is None for one in runs):
            return None
        first, *others = runs
        assert first is not None
        if name in NOT:
            return first.others()
        (second,) = others
        assert second is not None
        return first.both(second) if name in AND else first.either(second)


def _is_broadcast(node: Node) -> bool:
    return node.op in ("aten.expand.default", "aten.unsqueeze.default")


def _alike(one: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    size = max(len(one), len(other))
    return one.expand(size), other.expand(size)


def _sizes(*values: torch.Tensor) -> torch.Size:
    """Of the rows and columns of values together."""
    shapes = ((1, 1, *v.shape)[-2:] for v in values)
    return torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call,no-any-return]


def _thin(value: torch.Tensor) -> torch.Tensor | None:
    """The first of the outer indices, with one of rows, or columns, that are all the same; None
    where both differ.
    """
    while value.dim() > 2:
        value = value[0]
    for dim in range(value.dim()):
        first = value.narrow(dim, 0, 1)
        if value.shape[dim] > 1 and torch.equal(value, first.expand_as(value)):
            value = first
    return value if 1 in _sizes(value) else None


def _as_runs(value: Runs | torch.Tensor | None, columns: int) -> Runs | None:
    if not isinstance(value, torch.Tensor):
        return value
    if value.dtype != torch.bool:
        return None
    if _sizes(value)[1] == 1:
        return Runs.of(torch.tensor([0]), value.reshape(-1) * columns, columns)
    places = value.reshape(-1).nonzero().reshape(-1)
    ends = places[-1:] + 1
    if not len(places):
        return Runs(torch.tensor([0]), torch.tensor([0]), columns)
    return Runs(places[:1], ends, columns) if int(ends) - int(places[0]) == len(places) else None


def _compared(name: str, one: torch.Tensor, other: torch.Tensor) -> Runs | None:
    """Where a comparison of a value for each column with one for each row is true, or of one for
    each row with one for each column.
    """
    if _sizes(one)[1] == 1:
        name, one, other = SWAPPED[name], other, one
    dtype = torch.result_type(one, other)
    along, rows = one.reshape(-1).to(dtype), other.reshape(-1).to(dtype).contiguous()
    is_number = dtype != torch.bool and not bool((rows != rows).any())
    if not is_number or not bool((along[1:] >= along[:-1]).all()):  # NaN is never
        return None
    below = torch.searchsorted(along, rows)
    within = torch.searchsorted(along, rows, right=True)
    first, last = torch.zeros_like(below), torch.full_like(below, len(along))
    starts, ends = {
        "le": (first, within), "lt": (first, below), "eq": (below, within),
        "ge": (below, last), "gt": (within, last),
    }[name]  # fmt: skip
    return Runs.of(starts, ends, len(along))
