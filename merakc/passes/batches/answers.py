"""What parts of a batch that answer a question of Python's alike say of the whole batch's answer.

`mask.any()`, `int(lengths.max())`: where all parts say the same, the whole batch says it too. Of
`mask.sum()` or `x[len(x) // 2]` they say nothing. It is shown by the algebra of batches, on the
calls that stand before the questions in two recordings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from merakc.errors import RecordError
from merakc.frontend.values.reads import Read, Reads, really, run_node
from merakc.frontend.values.symbols import ITEM, has_number, numbers
from merakc.ir.batches import Rows
from merakc.ir.graph import Graph, Node, Output, OutputKind, Ref, TensorSpec, map_refs
from merakc.kernels.ops import is_pointwise, returns_view
from merakc.passes.batches.analyse import Analysis, analyse
from merakc.passes.batches.states import SAMPLES, Kind, ends
from merakc.passes.sharding.dims import given

SELECT, INDEX, RESHAPE = "aten.select.int", "aten.index.Tensor", "aten.reshape.default"
PUT, WHERE = "aten.index_put.default", "aten.where.self"
MOST_ELEMENTS = 1 << 22  # of a tensor whose places are looked at, one by one
SUMS = ("aten.sum.default", "aten.sum.dim_IntList")
LARGEST = frozenset(f"aten.{n}.default" for n in ("max", "min", "amax", "amin", "any", "all")) | {
    f"aten.{n}" for n in ("max.dim", "min.dim", "any.dim", "any.dims", "all.dim", "all.dims")
}
MORE = ("aten.gt.Scalar", "aten.ge.Scalar")


def unsaid(
    part: Reads, whole: Reads | None, sampled: Mapping[str, Rows], samples: int, total: int
) -> list[Read]:
    """What a part has read of which the parts do not say what it is for the whole batch.

    `part` is of a recording of `samples` samples, and `whole` of one of `total` that was told the
    same; `sampled` says where the samples of the batch's tensors stand.
    """
    others: Sequence[Read] = whole.asked if whole else ()
    asked = [
        (read, ref)
        for read, other in zip(part.asked, others, strict=False)
        if whole and (ref := _tensor(part, read)) == _tensor(whole, other) and read == other
    ]
    refs = dict.fromkeys(ref for _, ref in asked if ref is not None)
    if whole is None or not refs:
        return list(part.asked)
    try:
        found = analyse(_giving(part, refs), _giving(whole, refs), sampled, samples, total)
    except RecordError:
        return list(part.asked)
    answers = _Answers(found)
    said = [read for read, ref in asked if ref and answers.are_of_whole(ref, read)]
    return [read for read in part.asked if not any(read is other for other in said)]


def _tensor(reads: Reads, read: Read) -> Ref | None:
    """The tensor of one element that a question is about, where it is about one."""
    if len(read.number.symbols) != 1:
        return None
    ref, dim = reads.sources[read.number.symbols[0]]
    if dim is not None:
        return None
    made = next((n for n in reads.graph.nodes if n.name == ref.node), None)
    return made.refs[0] if made is not None and made.op == ITEM else ref


def _giving(reads: Reads, refs: Mapping[Ref, None]) -> Graph:
    """The graph of these values, but of those that are computed with numbers that were read, or of
    as many elements as values say (`unique`, `x[mask]`), of which shapes say nothing.
    """
    numbered: set[str] = set()
    for node in reads.graph.nodes:
        own = node.op == ITEM or any(True for _ in numbers((node.args, node.kwargs)))
        own = own or any(spec is not None and has_number(spec.shape) for spec in node.outputs)
        if own or not numbered.isdisjoint(r.node for r in node.refs):
            numbered.add(node.name)
    outputs = (Output(str(r), OutputKind.RESULT, r) for r in refs if r.node not in numbered)
    return _by_element(replace(reads.graph, outputs=tuple(outputs)).pruned())


def _by_element(graph: Graph) -> Graph:
    """The graph with selections that take every element in its place, as `x[arange(len(x))]` does,
    written as views, where their places follow from nothing; and `x[mask] = 1` by elements.
    """
    nodes, specs = [], graph.specs()
    values: dict[Ref, Any] = {Ref(name): tensor for name, tensor in graph.constants.items()}
    with really():
        for node in graph.nodes:
            every = specs[node.refs[0]] if node.op == INDEX else None
            if every and every.numel <= MOST_ELEMENTS and values.keys() >= set(node.refs[1:]):
                order = torch.arange(every.numel)
                places = map_refs(node.args[1], values.__getitem__)
                taken = torch.ops.aten.index.Tensor(order.view(every.shape), places)
                if torch.equal(taken.flatten(), order):
                    node = replace(node, op=RESHAPE, args=(node.refs[0], node.spec.shape))
            elif node.op == PUT and _fills(node, specs):
                mask, value = node.args[1][0], node.args[2]
                node = replace(node, op=WHERE, args=(mask, value, node.args[0]), kwargs=())
            elif node.op.startswith("aten.") and values.keys() >= set(node.refs):
                outs = run_node(node, values.__getitem__, {}, {})
                values |= {Ref(node.name, k): out for k, out in enumerate(outs)}
            nodes.append(node)
    return replace(graph, nodes=tuple(nodes)).pruned().without_unread_inputs()


def _fills(node: Node, specs: Mapping[Ref, TensorSpec]) -> bool:
    """Whether a write puts one value wherever a mask of the same shape is true."""
    x, indices, value = node.args[:3]
    adds = given(node, "accumulate") or len(indices) != 1
    if adds or specs[value].shape or specs[value].dtype != specs[x].dtype:
        return False
    mask = specs[indices[0]]
    return mask.dtype == torch.bool and mask.shape == specs[x].shape


@dataclass(frozen=True)
class _Answers:
    """Whether values of the whole batch are those of its parts, by what was found of them."""

    found: Analysis

    def are_of_whole(self, ref: Ref, read: Read) -> bool:
        """Whether the whole batch gives the answer that each of its parts gives."""
        at = {o.name: o.ref for o in self.found.part.outputs}.get(str(ref))
        if at is None:
            return False
        if self._is_of_a_part(at):
            return True
        (symbol,) = read.number.symbols
        is_true = [read.number.value({symbol: k}) == read.answer for k in (0, 1)] == [False, True]
        return is_true and self._is_more(at)

    def _is_of_a_part(self, ref: Ref) -> bool:
        """Whether each element of the whole batch's value is one of some part's, in its place."""
        while not self._is_alike(ref):
            node = self._maker(ref)
            if node is None:
                return False
            if node.op in LARGEST and ref.index == 0 and self._is_rows(node.refs[0]):
                return not self.found.states[ref].sampled
            if node.op == SELECT and self._is_rows(node.refs[0]):
                return self._takes_a_sample(node)
            before = self._behind(node)
            if before is None:
                return False
            ref = before
        return True

    def _is_more(self, ref: Ref) -> bool:
        """Whether it says that a sum over samples is more than a bound: if each of the terms is,
        their sum is.
        """
        node = self._maker(ref)
        while node is not None and returns_view(node.op):
            node = self._maker(node.refs[0])
        if node is None or node.op not in MORE:
            return False
        summed = self._maker(node.refs[0])
        return (
            node.args[1] >= 0
            and summed is not None
            and summed.op in SUMS
            and not summed.kwargs
            and self._is_rows(summed.refs[0])
        )

    def _behind(self, node: Node) -> Ref | None:
        """The one value that the elements of a call's result are made of, each of one of its."""
        before = [r for r in dict.fromkeys(node.refs) if not self._is_alike(r)]
        if len(before) != 1 or self.found.states[before[0]].sampled:
            return None
        return before[0] if is_pointwise(node.op) or returns_view(node.op) else None

    def _is_alike(self, ref: Ref) -> bool:
        """Whether every part has the whole batch's value."""
        state = self.found.states[ref]
        return state.kind is Kind.CONSTANT and not state.whole

    def _is_rows(self, ref: Ref) -> bool:
        state = self.found.states[ref]
        return state.kind is Kind.ROWS and not state.whole and state.rows is not None

    def _takes_a_sample(self, node: Node) -> bool:
        """Whether a call takes a row of samples that the whole batch has in the same place."""
        dim, index = given(node, "dim"), given(node, "index")
        factors = (self.found.states[node.refs[0]].dims or ())[dim]
        return SAMPLES in factors and (index in (0, -1) or (index > 0 and ends(factors)[0] == 1))

    def _maker(self, ref: Ref) -> Node | None:
        """The call of torch's that gives a value, with the same numbers for the whole batch."""
        node, twin = self.found.makers.get(ref.node), self.found.twins.get(ref.node)
        if node is None or twin is None or not node.op.startswith("aten."):
            return None
        return node if (node.args, node.kwargs) == (twin.args, twin.kwargs) else None
