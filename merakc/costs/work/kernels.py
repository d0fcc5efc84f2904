"""The kernels that a graph runs on a device, forward and backward: what each computes and moves.

The backward is told from the forward, node by node, so that planning needs no derivative: a product
gives one product for each argument with a gradient; anything else reads the gradients of its
results and what it had read, and writes those of its arguments. Equal kernels are counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

import torch

from merakc.analysis.aliases import FREE, equal_values, is_view, view_roots
from merakc.costs.work.float8 import forward_calls, gradient_calls
from merakc.costs.work.flops import (
    COLLECTIVES,
    SCALED,
    node_bytes,
    node_flops,
    product_shape,
    products,
    wire_bytes,
)
from merakc.ir.graph import Graph, InputKind, Node, Ref, TensorSpec, dtype_name
from merakc.kernels.collectives import AXES
from merakc.kernels.float8.scaled import SCALED_LINEAR
from merakc.kernels.ops import BACK, OUT, REST
from merakc.kernels.ring.swap import SWAP
from merakc.kernels.scores import PLACES as SCORES


class KernelKind(StrEnum):
    """What bounds a kernel."""

    PRODUCT = "product"
    ATTENTION = "attention"
    TRAFFIC = "traffic"
    COLLECTIVE = "collective"


class Kernel(NamedTuple):
    """Multiplications and additions, and bytes read and written; of a collective, bytes sent.

    `shape` of a product is (batch, m, n, k), and (0, 0, 0, 0) where it is none of matrices. `op`
    and `axis` are a collective's. A tuple, since kernels are counted and looked up by the hundred
    thousand.
    """

    kind: KernelKind
    flops: int = 0
    traffic_bytes: int = 0
    shape: tuple[int, int, int, int] = (0, 0, 0, 0)
    dtype: str = "bfloat16"
    op: str = ""
    axis: str = ""


@dataclass(frozen=True, slots=True)
class Work:
    """The kernels of a forward and of its backward, each with how often it runs, and those of the
    backward that no earlier part waits for; `listed` has them one by one, where they are off a
    graph.
    """

    forward: Counter[Kernel] = field(default_factory=Counter)
    backward: Counter[Kernel] = field(default_factory=Counter)
    weight_grad: Counter[Kernel] = field(default_factory=Counter)
    listed: tuple[Sequence[Kernel], ...] = field(default=((), (), ()), compare=False)


ALL_REDUCE = "merakc.all_reduce.default"
# What a collective is in the backward; those that are not here hand the gradient on.
CONJUGATE = {
    "merakc.copy_to.default": ALL_REDUCE,
    "merakc.gather_to.default": "merakc.reduce_scatter.default",
    "merakc.reduce_scatter.default": "merakc.all_gather.default",
    "merakc.scatter.default": "merakc.all_gather.default",
    "merakc.dispatch.default": "merakc.combine.default",
    "merakc.combine.default": "merakc.dispatch.default",
    "merakc.exchange.default": "merakc.exchange.default",
    SWAP: SWAP,
}
# Losses and tables in several steps: how often they move their largest tensor, forward and
# backward. A cross-entropy reads the logits for the maximum, for the exponentials and their sum,
# and its backward reads them again and writes the gradient.
LOSSES = {
    "composite.vocab_parallel_cross_entropy": (6, 4),
    "aten.cross_entropy_loss.default": (5, 3),
    "composite.vocab_parallel_embedding": (0, 0),
    "aten.embedding.default": (0, 0),
}
# They hand the gradient of their result to both arguments.
HANDS_ON = frozenset({"aten.add.Tensor", "aten.sub.Tensor", "aten.add.Scalar"})
# They read a row as a whole before they write it: what makes the row may run in the same kernel,
# what reads the result runs in another.
REDUCES = ("softmax", "layer_norm", "rms_norm", "group_norm")


def graph_work(graph: Graph, *, fused: bool = False) -> Work:
    """The kernels of a graph.

    With `fused`, nodes bound by memory that follow one another on tensors of as many elements are
    one kernel, as compilers and kernels written by hand have them. The products' flops are those
    that torch's `FlopCounterMode` counts.
    """
    return parts_work(graph, {}, 1, fused=fused)[0]


def parts_work(
    graph: Graph,
    part_of: Mapping[str, int],
    parts: int,
    *,
    fused: bool = False,
    again: Set[str] = frozenset(),
) -> tuple[Work, ...]:
    """The kernels of each part of a graph; `part_of` has the nodes that are not of part 0. Of equal
    calls the forward makes one; the backward makes nodes in `again` a second time.
    """
    reader, equal = _Reader(graph, part_of), {ref.node for ref in equal_values(graph)}
    found: list[tuple[list[Kernel], ...]] = [([], [], []) for _ in range(parts)]
    for group in reader.groups(fused=fused):
        forward, backward, weight_grad = found[part_of.get(group[0].name, 0)]
        own = list(reader.forward(group))
        forward += own if group[-1].name not in equal else ()
        backward += own if group[-1].name in again else ()
        for ref, kernel in reader.backward(group):
            backward.append(kernel)
            if ref not in reader.awaited:
                weight_grad.append(kernel)
    for ref, kernel in reader.accumulations():
        found[part_of.get(ref.node, 0)][1].append(kernel)
    return tuple(Work(Counter(f), Counter(b), Counter(w), (f, b, w)) for f, b, w in found)


def node_kernels(node: Node, specs: Mapping[Ref, TensorSpec]) -> tuple[Kernel, ...]:
    """The kernels that a node runs when it is run by itself.

    Of products beside a collective in one node, that of the products.
    """
    if node.op in FREE or node.op == OUT or node.op in CONJUGATE.keys() - COLLECTIVES:
        return ()
    dtype = _dtype(node)
    if node.op in (REST, BACK):  # what stays is copied, on the device
        stays = [node.spec] if node.op == REST else [specs[ref] for ref in node.refs[1:]]
        moved_bytes = 2 * sum(spec.size_bytes for spec in stays)
        return (Kernel(KernelKind.TRAFFIC, 0, moved_bytes, dtype=dtype),) if stays else ()
    if node.op in COLLECTIVES:
        return (collective_kernel(node, node.op, wire_bytes(node, specs)),)
    if node.op in LOSSES:
        passed_bytes = _passed(node, specs, LOSSES[node.op][0])
        own = Kernel(KernelKind.TRAFFIC, 0, passed_bytes, dtype=dtype)
        if node.op != "composite.vocab_parallel_embedding":
            return (own,)
        return own, collective_kernel(node, ALL_REDUCE, node.spec.size_bytes)
    if node.op in SCORES:
        return tuple(_of_scores(node, specs, products(node), backward=SCORES[node.op] > 0))
    if node.op == SCALED_LINEAR:
        calls, specs = forward_calls(node, specs)
        return tuple(kernel for call in calls for kernel in node_kernels(call, specs))
    flops, moved_bytes = node_flops(node, specs), node_bytes(node, specs)
    if flops:
        return (_product(node, product_shape(node, specs), flops, moved_bytes),)
    return (Kernel(KernelKind.TRAFFIC, 0, moved_bytes, dtype=dtype),)


def collective_kernel(node: Node, op: str, size_bytes: int) -> Kernel:
    """A node's collective, over the axis that its arguments name; else over tp."""
    axis = next((arg for arg in node.args if arg in AXES), "tp")
    dtype = dtype_name(node.spec.dtype)
    return Kernel(KernelKind.COLLECTIVE, 0, size_bytes, dtype=dtype, op=op, axis=axis)


def moves_nothing(node: Node) -> bool:
    """Whether a node is a view in the backward too, where some views are collectives."""
    return is_view(node) and node.op not in CONJUGATE


class _Reader:
    """Reads kernels off a graph. The gradients of `awaited` values are waited for by earlier parts
    of it.
    """

    def __init__(self, graph: Graph, part_of: Mapping[str, int]) -> None:
        self.graph, self.specs, self.grads = graph, graph.specs(), graph.grad_values()
        self.awaited = self._awaited(part_of)
        self.parameters = {Ref(i.name) for i in graph.inputs if i.kind is InputKind.PARAMETER}
        self.readers: dict[Ref, set[str]] = {}
        self.origin = view_roots(graph, lambda node, _: moves_nothing(node))
        for node in graph.nodes:
            if moves_nothing(node):
                continue
            for ref in node.refs:
                for seen in {ref, self.origin.get(ref, ref)}:
                    self.readers.setdefault(seen, set()).add(node.name)
        for out in graph.outputs:
            self.readers.setdefault(self.origin.get(out.ref, out.ref), set()).add("output")

    def _awaited(self, part_of: Mapping[str, int]) -> set[Ref]:
        given = {Ref(i.name) for i in self.graph.inputs if i.kind is InputKind.ACTIVATION}
        found = given & self.grads
        for node in self.graph.nodes:
            part = part_of.get(node.name, 0)
            read = [ref for ref in node.refs if ref in self.grads]
            before = {ref for ref in read if part_of.get(ref.node, part) < part}
            found |= before
            if before or not found.isdisjoint(read):
                found.update(ref for ref in node.outs if ref in self.grads)
        return found

    def groups(self, *, fused: bool) -> list[list[Node]]:
        """The nodes that run, those of one kernel together."""
        behind: dict[Ref, list[Node]] = {}  # by the value that a node may join behind
        found: list[list[Node]] = []
        for node in self.graph.nodes:
            if moves_nothing(node):
                continue
            sources = [self.origin.get(ref, ref) for ref in node.refs]
            plain = self._is_plain(node)
            ready = [behind[s] for s in sources if s in behind] if fused and plain else []
            group = next((g for g in ready if g[-1].spec.numel == node.spec.numel), [])
            if group:
                behind.pop(Ref(group[-1].name))
                group.append(node)
            else:
                group = [node]
                found.append(group)
            if plain and not any(name in node.op for name in REDUCES):
                behind[Ref(node.name)] = group
        return found

    def forward(self, group: list[Node]) -> Iterator[Kernel]:
        """The kernels of a group."""
        node = group[0]
        if node.op in COLLECTIVES:
            yield self._collective(node, node.op)
        elif self._is_plain(node):
            read, written = self._outside(group)
            moved = sum(self.specs[ref].size_bytes for ref in read | written)
            yield Kernel(KernelKind.TRAFFIC, 0, moved, dtype=dtype_name(node.spec.dtype))
        else:
            yield from node_kernels(node, self.specs)

    def backward(self, group: list[Node]) -> Iterator[tuple[Ref, Kernel]]:
        """The kernels of a group's gradients, each with an argument whose gradient it makes, of
        several one that is awaited; none where nothing asks for them.
        """
        node = group[0]
        asked = [r for n in group for r in n.refs if r in self.grads]
        if not any(n.grad_outputs(self.grads) for n in group) or not asked:
            return
        dtype = dtype_name(node.spec.dtype)
        any_of = next((ref for ref in asked if ref in self.awaited), asked[0])
        if node.op in CONJUGATE:
            yield any_of, self._collective(node, CONJUGATE[node.op])
        elif node.op in COLLECTIVES:
            return
        elif node.op in LOSSES:
            moved = _passed(node, self.specs, LOSSES[node.op][1])
            yield any_of, Kernel(KernelKind.TRAFFIC, 0, moved, dtype=dtype)
        elif not self._is_plain(node):
            yield from self._product_gradients(node, asked, any_of)
        else:
            moved = self._gradient_bytes(group)
            yield any_of, Kernel(KernelKind.TRAFFIC, 0, moved, dtype=dtype)

    def accumulations(self) -> Iterator[tuple[Ref, Kernel]]:
        """The sums of gradients of values that several nodes read, by value."""
        for ref, names in self.readers.items():
            more = len(names - {"output"}) - 1
            if more > 0 and ref in self.grads - self.parameters and ref not in self.origin:
                spec = self.specs[ref]
                dtype = dtype_name(spec.dtype)
                kernel = Kernel(KernelKind.TRAFFIC, 0, 3 * spec.size_bytes, dtype=dtype)
                yield from [(ref, kernel)] * more

    def _product_gradients(
        self, node: Node, asked: list[Ref], any_of: Ref
    ) -> Iterator[tuple[Ref, Kernel]]:
        if node.op in SCORES:
            x, weight = node.args[:2]
            again = 1 + (x in asked)
            for kernel in _of_scores(node, self.specs, again, backward=True):
                yield any_of, kernel
            if weight in asked:
                yield weight, next(_of_scores(node, self.specs, 1, backward=True))
            return
        flops, moved = node_flops(node, self.specs), node_bytes(node, self.specs)
        batch, m, n, k = product_shape(node, self.specs)
        if "attention" in node.op:  # the scores once more, and four products
            yield any_of, _product(node, (batch, m, n, k), flops * 5 // 2, 2 * moved)
            return
        first, second = node.args[:2] if len(node.args) > 1 else (None, None)
        if node.op == SCALED_LINEAR and first in asked:
            calls, specs = gradient_calls(node, self.specs)
            yield from ((first, kernel) for call in calls for kernel in node_kernels(call, specs))
        elif first in asked or not node.refs:
            yield first, _product(node, (batch, m, k, n), flops, moved)
        if second in asked:
            yield second, _product(node, (batch, k, n, m), flops, moved)
        for bias in asked:
            if bias not in (first, second):  # a sum over rows
                dtype = dtype_name(node.spec.dtype)
                yield bias, Kernel(KernelKind.TRAFFIC, 0, node.spec.size_bytes, dtype=dtype)

    def _gradient_bytes(self, group: list[Node]) -> int:
        """Gradients of results read, those of arguments written, and what was read, read again."""
        read, written = self._outside(group)
        last = group[-1]
        handed = set(last.refs) if last.op in HANDS_ON else set()
        whole = last.spec.numel
        total = sum(self.specs[r].size_bytes for r in written if r in self.grads)
        for ref in read:
            spec = self.specs[ref]
            if spec.numel < whole:  # a bias or a weight of a norm: its gradient is a sum
                total += last.spec.size_bytes * (ref in self.grads)
            elif ref not in handed:
                linear = all(n.op in HANDS_ON for n in group if ref in n.refs)
                total += spec.size_bytes * ((ref in self.grads) + (not linear))
        return total if handed != set(last.refs) or len(group) > 1 else 0

    def _outside(self, group: list[Node]) -> tuple[set[Ref], set[Ref]]:
        """What a kernel reads and writes beyond its own values."""
        inside = {n.name for n in group}
        seen = {ref for n in group for ref in n.refs}
        read = {ref for ref in seen if self.origin.get(ref, ref).node not in inside}
        made = {Ref(n.name, k) for n in group for k, out in enumerate(n.outputs) if out}
        last = Ref(group[-1].name)
        written = {r for r in made if r == last or self.readers.get(r, set()) - inside}
        return read, written

    def _collective(self, node: Node, op: str) -> Kernel:
        sizes = [self.specs[r].size_bytes for r in node.refs if r not in self.parameters]
        size = max([*sizes, *(o.size_bytes for o in node.outputs if o is not None)])
        return collective_kernel(node, op, size // 2 if op == SWAP else size)

    def _is_plain(self, node: Node) -> bool:
        """Whether a node does no more than move its tensors."""
        special = node.op in COLLECTIVES or node.op in CONJUGATE or node.op in LOSSES
        return not special and not node_flops(node, self.specs)


def _of_scores(
    node: Node, specs: Mapping[Ref, TensorSpec], count: int, *, backward: bool
) -> Iterator[Kernel]:
    """So many products of the scores that a loss reads, and its passes over them in blocks."""
    place = SCORES[node.op]
    x, weight = (specs[ref] for ref in node.args[place : place + 2])
    (rows, width), classes = x.shape, weight.shape[0]
    moved = x.size_bytes + weight.size_bytes + rows * classes * x.dtype.itemsize
    dtype, shape = dtype_name(x.dtype), (1, rows, classes, width)
    product = Kernel(KernelKind.PRODUCT, 2 * rows * width * classes, moved, shape, dtype)
    yield from [product] * count
    wide = max(x.dtype.itemsize, torch.float32.itemsize)
    passes = LOSSES["aten.cross_entropy_loss.default"][backward]
    yield Kernel(KernelKind.TRAFFIC, 0, passes * rows * classes * wide, dtype=dtype)


def _product(node: Node, shape: tuple[int, int, int, int], flops: int, moved_bytes: int) -> Kernel:
    attention = "attention" in node.op
    kind = KernelKind.ATTENTION if attention else KernelKind.PRODUCT
    dtype = "float8" if node.op in SCALED else _dtype(node)
    return Kernel(kind, flops, moved_bytes, shape, dtype)


def _dtype(node: Node) -> str:
    """That of the first tensor made: a backward need not make the first of its results."""
    return next((dtype_name(o.dtype) for o in node.outputs if o is not None), "float32")


def _passed(node: Node, specs: Mapping[Ref, TensorSpec], passes: int) -> int:
    """Of a loss, so many times its largest tensor; of a table, its rows in and out."""
    if not passes:
        return 2 * node.spec.size_bytes
    return passes * max(specs[r].size_bytes for r in node.refs)
