"""Writes a recorded forward so that what depends on the batch alone stands apart in it.

A mean over valid labels is a sum over a count of the labels; a tensor made in the shape of another
is made of its sizes. What is copied to have it in one piece stays so, since a kernel may ask for
it; but whether a copy is needed can depend on the number of samples, and then there are none. Of
copies of one value fewer are made where only some are read (`merakc.passes.batches.windows`).
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch

from merakc.ir.graph import Graph, Node, Ref, TensorSpec
from merakc.passes.batches.windows import with_windows
from merakc.passes.sharding.dims import given, signature

CROSS_ENTROPY = "aten.cross_entropy_loss.default"
NLL = ("aten.nll_loss_forward.default", "aten.nll_loss2d_forward.default")
SUM_OF_MEAN = {"aten.mean.default": "aten.sum.default", "aten.mean.dim": "aten.sum.dim_IntList"}
MEAN, SUM = 1, 2  # torch's codes for a loss's reduction
FULL = "aten.full.default"
# Calls that read the shape of an argument alone, and what they fill the result with.
FILLED = {
    "aten.zeros_like.default": 0,
    "aten.ones_like.default": 1,
    "aten.empty_like.default": 0,
    "aten.new_zeros.default": 0,
    "aten.new_ones.default": 1,
    "aten.new_empty.default": 0,
}
FILLED_BY_ARGUMENT = ("aten.full_like.default", "aten.new_full.default")
COPIES = frozenset({"aten.contiguous.default", "aten.clone.default"})
# They read memory as it lies, or refuse it.
OF_MEMORY = frozenset({"aten.as_strided_scatter.default", "aten.view_as_complex.default",
                       "aten.view_as_real.default", "aten.view.dtype"})  # fmt: skip
CAT = "aten.cat.default"


def normalised(graph: Graph, *, copies: bool = True) -> Graph:
    """The same function, with counts of labels and shapes of tensors as nodes of their own; without
    `copies` that only have a value in one piece, where nothing sees that.
    """
    writer = _Writer(graph)
    for node in graph.nodes:
        if node.op in (CROSS_ENTROPY, *NLL) and given(node, "reduction") == MEAN:
            writer.mean_over_labels(node)
        elif node.op in FILLED or node.op in FILLED_BY_ARGUMENT:
            writer.filled(node)
        elif node.op == CAT:
            writer.joined(node)
        else:
            writer.nodes.append(node)
    made = graph.with_nodes(writer.nodes).renamed(writer.counts)
    made = with_windows(made.pruned())
    return made if copies else without_copies(made)


def without_copies(graph: Graph) -> Graph:
    """The graph without copies that only torch's own operations read, none of them memory."""
    if any(n.op in OF_MEMORY for n in graph.nodes):
        return graph
    kept = {o.ref for o in graph.outputs}
    for node in graph.nodes:
        if not node.op.startswith("aten."):
            kept.update(node.refs)
    names: dict[Ref, Ref] = {}
    nodes, grads = [], graph.grad_values()
    for node in graph.nodes:
        ref = Ref(node.name)
        if node.op in COPIES and ref not in kept and (ref in grads) == (node.refs[0] in grads):
            names[ref] = names.get(node.refs[0], node.refs[0])
        else:
            nodes.append(node)
    return replace(graph, nodes=tuple(nodes)).renamed(names)


def means_over_samples(part: Graph, whole: Graph) -> set[str]:
    """The means that are of more elements where there are more samples, by name, in dtypes whose
    sums are as exact.
    """
    one, two = part.specs(), whole.specs()
    twins = {n.name: n for n in whole.nodes}
    return {
        n.name
        for n in part.nodes
        if n.op in SUM_OF_MEAN
        and n.spec.dtype.itemsize >= torch.float32.itemsize
        and _averaged(n, one) != _averaged(twins[n.name], two)
    }


def _averaged(node: Node, specs: Mapping[Ref, TensorSpec]) -> int:
    """The elements that each mean is of."""
    return specs[node.refs[0]].numel // max(node.spec.numel, 1)


def summed(graph: Graph, names: Collection[str]) -> Graph:
    """The graph with these means as sums over a number, which are divided when they are added up:
    a mean of ones is 1, where sums of tenths are less.
    """
    if not names:
        return graph
    specs, nodes = graph.specs(), []
    for node in graph.nodes:
        if node.name in names and node.op in SUM_OF_MEAN:
            total = replace(node, name=sum_name(node), op=SUM_OF_MEAN[node.op])
            args = Ref(total.name), _averaged(node, specs)
            nodes += [total, replace(node, op="aten.div.Tensor", args=args, kwargs=())]
        else:
            nodes.append(node)
    return replace(graph, nodes=tuple(nodes))


def sum_name(mean: Node) -> str:
    """The name of the sum that a mean is divided from."""
    return f"{mean.name}.summed"


class _Writer:
    def __init__(self, graph: Graph) -> None:
        self.specs = graph.specs()
        self.nodes: list[Node] = []
        self.counts: dict[Ref, Ref] = {}  # what else a loss gives, for its derivative

    def filled(self, node: Node) -> None:
        value = FILLED[node.op] if node.op in FILLED else given(node, "fill_value")
        if isinstance(value, Ref):
            self.nodes.append(node)
            return
        dtype = node.spec.dtype
        value = bool(value) if dtype == torch.bool else value
        kwargs = (("dtype", dtype),)
        self.nodes.append(replace(node, op=FULL, args=(node.spec.shape, value), kwargs=kwargs))

    def joined(self, node: Node) -> None:
        """Writes a concatenation without the tensors that are empty, of which one may say the
        dtype.
        """
        full = tuple(r for r in node.args[0] if self.specs[r].numel)
        dtypes = [self.specs[r].dtype for r in full]
        if dtypes and functools.reduce(torch.promote_types, dtypes) != node.spec.dtype:
            full = ()
        args = (full or node.args[0], *node.args[1:])
        self.nodes.append(node if args == node.args else node.reading(args))

    def mean_over_labels(self, node: Node) -> None:
        """`sum / count`, with the count of a part as the batch alone gives it."""
        order = sorted(signature(node.op), key=lambda name: signature(node.op)[name][0])
        args = tuple(SUM if name == "reduction" else given(node, name) for name in order)
        self.nodes.append(replace(node, name=f"{node.name}.summed", args=args, kwargs=()))
        summed, count = Ref(self.nodes[-1].name), self._count(node)
        if isinstance(count, Ref):
            self.counts[Ref(node.name, 1)] = count
        quotient = replace(
            node, op="aten.div.Tensor", args=(summed, count), kwargs=(),
            outputs=node.outputs[:1],
        )  # fmt: skip
        self.nodes.append(quotient)

    def _count(self, node: Node) -> Ref | int:
        """What the valid labels of a loss count, or weigh together."""
        logits, target, weight = node.args[0], node.args[1], given(node, "weight")
        spec, dtype = self.specs[target], node.spec.dtype
        if spec.dtype.is_floating_point:  # probabilities of classes: every label is valid
            shape = self.specs[logits].shape
            return self.specs[logits].numel // shape[1 if len(shape) > 1 else 0]
        ignored = given(node, "ignore_index")
        valid = self._add(
            node, "valid", "aten.ne.Scalar", (target, ignored), spec.shape, torch.bool
        )
        each = self._add(node, "each", "aten.to.dtype", (valid, dtype), spec.shape, dtype)
        if weight is not None:
            index = self._add(
                node, "index", "aten.mul.Tensor", (target, valid), spec.shape, torch.int64
            )
            picked = self._add(
                node, "picked", "aten.index.Tensor", (weight, (index,)), spec.shape, dtype
            )
            each = self._add(node, "weighed", "aten.mul.Tensor", (picked, each), spec.shape, dtype)
        return self._add(node, "count", "aten.sum.default", (each,), (), dtype)

    def _add(
        self,
        node: Node,
        suffix: str,
        op: str,
        args: Any,
        shape: tuple[int, ...],
        dtype: torch.dtype,
    ) -> Ref:
        name = f"{node.name}.{suffix}"
        spec = TensorSpec(shape, dtype)
        self.nodes.append(
            Node(name, op, args, (), (spec,), module=node.module, source=node.source, grad=False)
        )
        return Ref(name)
