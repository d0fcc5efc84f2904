"""Makes the losses of micro-batches add up to the loss of the whole batch.

A cross-entropy that averages over the valid labels of its micro-batch cannot simply be averaged
again: micro-batches hold different numbers of valid labels. The loss is taken apart into the terms
that it is a linear function of. A sum over the samples is left alone. An average over what the
batch itself says how much there is of (valid labels, a mask's ones) becomes that sum, divided by
the number in the whole batch. Anything else counts as an average over samples, and is divided by
the number of micro-batches. Then the sum over micro-batches is the loss, and its gradient likewise.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from merakc.ir.batches import Head
from merakc.ir.graph import Graph, Input, InputKind, Node, Output, OutputKind, Ref, TensorSpec
from merakc.kernels.ops import resolve_op
from merakc.passes.dims import argument

CROSS_ENTROPY = "aten.cross_entropy_loss.default"
# Losses over class indices, which average over the labels that are not ignored.
LABELLED = frozenset(
    {CROSS_ENTROPY, "aten.nll_loss_forward.default", "aten.nll_loss2d_forward.default"}
)
MEAN, SUM = 1, 2  # torch's codes for a loss's reduction
MICRO_BATCH_SCALE = "loss_scale"
PASSED = frozenset(
    {"aten.to.dtype", "aten.reshape.default", "aten.squeeze.default", "aten.clone.default",
     "aten.contiguous.default", "aten.alias.default"}
)  # fmt: skip
# What passes on a single number besides, and moves dims elsewhere.
OF_ONE = PASSED | {"aten.permute.default", "aten.transpose.int", "aten.unsqueeze.default"}
MUL, DIV = "aten.mul.Tensor", "aten.div.Tensor"
LINEAR = frozenset({MUL, DIV, "aten.neg.default"})  # where one argument alone has a gradient
ADDED = frozenset({"aten.add.Tensor", "aten.sub.Tensor"})
STACK = "aten.stack.default"
SUMS = frozenset({"aten.sum.default", "aten.sum.dim_IntList", "aten.dot.default"})
MEANS = frozenset({"aten.mean.default", "aten.mean.dim"})
PRODUCTS = frozenset({"aten.bmm.default", "aten.mm.default", "aten.matmul.default"})  # of an einsum
# What a divisor may go through between the sum that counts and the division.
GUARDS = frozenset({"aten.clamp.default", "aten.clamp_min.default", "aten.add.Tensor"}) | PASSED


@dataclass(frozen=True, slots=True)
class WeighedLoss:
    """The graph with its loss to be summed, and how to count.

    `counts` computes from the tensors of a micro-batch, for each scalar input `loss_scale:K` of
    the graph, the number that it is one over, once summed over the whole batch. The input
    `loss_scale` is one over the number of micro-batches.
    """

    graph: Graph
    counts: Graph | None
    head: Head | None = None


def weigh_loss(graph: Graph) -> WeighedLoss:
    """Rewrites the loss of a training graph; a graph without a loss is returned as it is.

    Other outputs keep their values.
    """
    roots = [o for o in graph.outputs if o.kind is OutputKind.LOSS]
    if not roots:
        return WeighedLoss(graph, None)
    grads = graph.grad_values()
    if any(o.ref not in grads for o in roots):  # recorded under no_grad, or all frozen
        grads = _computed(graph)
    weigher = _Weigher(graph, dict(graph.specs()), grads)
    refs = {o.ref: weigher.weigh(o.ref) for o in roots}
    nodes = [n for old in graph.nodes for n in (old, *weigher.nodes.get(old.name, ()))]
    outputs = tuple(o.at(refs[o.ref]) if o in roots else o for o in graph.outputs)
    inputs = (*graph.inputs, *weigher.scales.values())
    weighed = Graph(inputs, tuple(nodes), outputs, graph.constants, graph.functions).pruned()
    return WeighedLoss(weighed, _count_graph(graph, weigher.counts) if weigher.counts else None)


def _computed(graph: Graph) -> set[Ref]:
    """The values that depend on a parameter."""
    found = {Ref(i.name) for i in graph.inputs if i.kind is InputKind.PARAMETER}
    for node in graph.nodes:
        if not found.isdisjoint(node.refs):
            found.update(Ref(node.name, k) for k in range(len(node.outputs)))
    return found


@dataclass(slots=True)
class _Weigher:
    """Follows a loss from its end, and writes the weighed form of each node behind the node."""

    graph: Graph
    specs: dict[Ref, TensorSpec]
    grads: set[Ref]
    nodes: dict[str, list[Node]] = field(default_factory=dict)
    scales: dict[str, Input] = field(default_factory=dict)
    counts: dict[str, Node | Ref] = field(default_factory=dict)  # what each scale counts
    made: dict[Ref, Ref] = field(default_factory=dict)
    producers: dict[str, Node] = field(init=False)

    def __post_init__(self) -> None:
        self.producers = {n.name: n for n in self.graph.nodes}

    def weigh(self, ref: Ref) -> Ref:
        """The value that adds up over micro-batches in the place of `ref`."""
        if ref not in self.made:
            assert ref.node in self.producers, "the loss is an input of the graph"
            self.made[ref] = self._weigh(ref, self.producers[ref.node])
        return self.made[ref]

    def _weigh(self, ref: Ref, node: Node) -> Ref:
        follow = [r for r in node.refs if r in self.grads]
        if node.op in OF_ONE and node.spec.numel == 1 and len(follow) == 1:
            return self._copy(node, (self.weigh(follow[0]), *node.args[1:]))
        if node.op in LINEAR and len(follow) == 1:
            return self._linear(ref, node, follow[0])
        if node.op in ADDED and node.spec.numel == 1:
            return self._copy(node, tuple(self._addend(node, a) for a in node.args))
        parts = self._stacked(node)
        if parts:
            stack = self.producers[node.args[0].node]
            whole = self._copy(stack, (tuple(map(self.weigh, parts)), *stack.args[1:]))
            return self._copy(node, (whole, *node.args[1:]))
        if node.op in LABELLED and self._has_indices(node):
            if argument(node, 3, "reduction", MEAN) == SUM:
                return ref
            return self._scaled(node, self._summing(node), self._count(node.name, node))
        return ref if self._is_sum(ref) else self._scaled(node, ref)

    def _linear(self, ref: Ref, node: Node, term: Ref) -> Ref:
        """A product or quotient with one factor that has a gradient."""
        others = [a for a in node.args if a != term]
        factor = others[0] if others else 1
        if self._is_average(node):
            if isinstance(factor, Ref):
                return self._scaled(node, term, self._count(node.name, factor))
            return self._scaled(node, ref)
        if isinstance(factor, Ref) and self._is_sampled(factor) and not self._is_sum(term):
            return self._scaled(node, ref)  # a weight of its own for each micro-batch
        now = self.weigh(term)
        return self._copy(node, tuple(now if a == term else a for a in node.args))

    def _addend(self, node: Node, value: Any) -> Any:
        """One side of a sum or difference, be it a term, another value or a number."""
        if isinstance(value, Ref):
            return self.weigh(value) if value in self.grads else self._scaled(node, value)
        if value == 0:
            return value
        scale = self._scale(MICRO_BATCH_SCALE, node.spec.dtype)
        return self._scaled_node(node, (scale, value), TensorSpec((), node.spec.dtype))

    def _stacked(self, node: Node) -> tuple[Ref, ...]:
        """The scalars that a sum or mean is taken of, where they were stacked for it."""
        if node.op not in ("aten.sum.default", "aten.mean.default"):
            return ()
        source = self.producers.get(node.args[0].node)
        if source is None:
            return ()
        parts = source.args[0] if source.op == STACK else ()
        whole = all(r in self.grads and self.specs[r].numel == 1 for r in parts)
        return tuple(parts) if whole else ()

    # What a value is

    def _has_indices(self, node: Node) -> bool:
        """Whether the target of a loss holds class indices, and no probabilities."""
        return not self.specs[node.args[1]].dtype.is_floating_point

    def _is_sum(self, ref: Ref) -> bool:
        """Whether a scalar is a sum over samples, up to a factor; a sum of weights is none."""
        node = self.producers.get(ref.node)
        if node is None or self.specs[ref].numel != 1 or not self._is_sampled(ref):
            return False
        if node.op in SUMS | PRODUCTS:
            return self._first_reduction(node) not in MEANS
        if node.op in MEANS:
            return self._first_reduction(node) in SUMS
        if node.op in OF_ONE | LINEAR:
            follow = [r for r in node.refs if r in self.grads]
            return bool(follow) and self._is_sum(follow[0]) and not self._is_average(node)
        return _reduction(node) == SUM

    def _first_reduction(self, node: Node) -> str:
        """The op in front of a reduction that has removed the dim of the samples, if any."""
        source = self.producers.get(node.refs[0].node)
        if source is None or not source.refs:
            return ""
        if source.op in ("aten.sum.dim_IntList", "aten.mean.dim"):
            dims = argument(source, 1, "dim") or (0,)
            if 0 in dims or -len(self.specs[source.refs[0]].shape) in dims:
                return source.op
        passed = source.op in PASSED | LINEAR | SUMS | MEANS
        return self._first_reduction(source) if passed else ""

    def _is_average(self, node: Node) -> bool:
        """Whether a node divides a sum by the number of what was summed."""
        if node.op != DIV:
            return False
        term, by = node.args
        if self._is_sum(term):
            return self._is_count(by) if isinstance(by, Ref) else by in self._numbers(term)
        # A mean over a mask's mean is the sum over the mask's sum.
        maker = self.producers.get(term.node) if isinstance(term, Ref) else None
        is_mean = maker is not None and maker.op in MEANS and self.specs[term].numel == 1
        return is_mean and isinstance(by, Ref) and self._is_count(by, MEANS)

    def _is_count(
        self, ref: Ref, ops: frozenset[str] = SUMS | {"aten.count_nonzero.default"}
    ) -> bool:
        """Whether the batch alone says what a value is, and it is a sum (or other op) over its
        samples.
        """
        inputs = self._inputs_of(ref)
        known = (InputKind.BATCH, InputKind.BUFFER, InputKind.CONSTANT)
        node = self.producers.get(ref.node)
        while node is not None and node.op in GUARDS:
            node = self.producers.get(node.refs[0].node)
        counted = node is not None and node.op in ops
        return counted and self._is_sampled(ref) and all(i.kind in known for i in inputs)

    def _inputs_of(self, ref: Ref) -> list[Input]:
        """The inputs that a value is computed from."""
        nodes = Graph((), self.graph.nodes, (Output("", OutputKind.RESULT, ref),)).pruned().nodes
        read = {ref.node} | {r.node for n in nodes for r in n.refs}
        return [i for i in self.graph.inputs if i.name in read]

    def _is_sampled(self, ref: Ref) -> bool:
        """Whether a value depends on tensors that are split into micro-batches."""
        return any(i.kind is InputKind.BATCH and i.spec.shape for i in self._inputs_of(ref))

    def _numbers(self, ref: Ref) -> set[int]:
        """By what a sum is divided to be a mean: its elements, or the samples of a micro-batch."""
        node = self.producers[ref.node]
        while node.op not in SUMS and node.refs[0].node in self.producers:
            node = self.producers[node.refs[0].node]
        batch = [i.spec.shape[0] for i in self.graph.inputs if i.kind is InputKind.BATCH
                 and i.spec.shape]  # fmt: skip
        commonest = Counter(batch).most_common(1)
        return {self.specs[node.refs[0]].numel} | {size for size, _ in commonest}

    # What is written

    def _append(self, after: Node, node: Node) -> Ref:
        """Writes a node behind another; its name is made unique."""
        made = self.nodes.setdefault(after.name, [])
        if any(n.name == node.name for n in made):
            node = replace(node, name=f"{node.name}.{len(made)}")
        made.append(node)
        self.specs[Ref(node.name)] = node.spec
        return Ref(node.name)

    def _copy(self, node: Node, args: tuple[Any, ...]) -> Ref:
        return self._append(node, replace(node, name=f"{node.name}.weighed", args=args))

    def _scaled(self, after: Node, ref: Ref, scale: str = MICRO_BATCH_SCALE) -> Ref:
        spec = self.specs[ref]
        return self._scaled_node(after, (ref, self._scale(scale, spec.dtype)), spec)

    def _scaled_node(self, after: Node, args: tuple[Any, ...], spec: TensorSpec) -> Ref:
        name = f"{after.name}.scaled"
        return self._append(after, Node(name, MUL, args, (), (spec,), after.module, after.source))

    def _scale(self, name: str, dtype: torch.dtype) -> Ref:
        """The scalar input of that name; each dtype that it is wanted in is an input of its own."""
        spec = TensorSpec((), dtype)
        own = [i for i in self.scales.values() if i.target == name]
        found = next((i for i in own if i.spec == spec), None)
        if found is None:
            found = Input(name if not own else f"{name}.{len(own)}", InputKind.SCALAR, spec, name)
            self.scales[found.name] = found
        return Ref(found.name)

    def _count(self, name: str, what: Node | Ref) -> str:
        scale = f"{MICRO_BATCH_SCALE}:{name}"
        self.counts[scale] = what
        return scale

    def _summing(self, node: Node) -> Ref:
        """The same loss, summed over its labels."""
        args: tuple[Any, ...] = (
            *node.args[:2],
            argument(node, 2, "weight"),
            SUM,
            argument(node, 4, "ignore_index", -100),
        )
        if node.op == CROSS_ENTROPY:
            args = (*args, argument(node, 5, "label_smoothing", 0.0))
        return self._append(node, replace(node, name=f"{node.name}.summed", args=args, kwargs=()))


def _reduction(node: Node) -> int | None:
    """The reduction of one of torch's losses; None of any other op."""
    if not node.op.startswith("aten."):
        return None
    names = [a.name for a in resolve_op(node.op)._schema.arguments]  # type: ignore[attr-defined]
    if "reduction" not in names:
        return None
    found: int = argument(node, names.index("reduction"), "reduction", MEAN)
    return found


def _count_graph(graph: Graph, counts: dict[str, Node | Ref]) -> Graph:
    """Counts the valid labels, or sums their class weights: one 0-dim float64 output each."""
    specs = graph.specs()
    nodes = list(graph.nodes)
    outputs = []

    def add(op: str, args: tuple[Any, ...], shape: tuple[int, ...], dtype: torch.dtype) -> Ref:
        label = f"count.{len(nodes)}"
        nodes.append(Node(label, op, args, (), (TensorSpec(shape, dtype),), grad=False))
        return Ref(label)

    for name, what in counts.items():
        if isinstance(what, Ref):
            scalar = add("aten.reshape.default", (what, ()), (), specs[what].dtype)
            total = add("aten.to.dtype", (scalar, torch.float64), (), torch.float64)
            outputs.append(Output(name, OutputKind.RESULT, total))
            continue
        target, weight = what.args[1], argument(what, 2, "weight")
        shape = specs[target].shape
        ignored = argument(what, 4, "ignore_index", -100)
        valid = add("aten.ne.Scalar", (target, ignored), shape, torch.bool)
        number = add("aten.to.dtype", (valid, torch.float64), shape, torch.float64)
        if weight is not None:
            index = add("aten.mul.Tensor", (target, valid), shape, torch.int64)
            each = add("aten.take.default", (weight, index), shape, specs[weight].dtype)
            number = add("aten.mul.Tensor", (each, number), shape, torch.float64)
        total = add("aten.sum.default", (number,), (), torch.float64)
        outputs.append(Output(name, OutputKind.RESULT, total))
    counting = replace(graph, nodes=tuple(nodes), outputs=tuple(outputs)).pruned()
    read = {r.node for n in counting.nodes for r in n.refs}
    return replace(counting, inputs=tuple(i for i in counting.inputs if i.name in read))
