"""Recordings of one forward for several numbers of samples: whether they are the same calls."""

from __future__ import annotations

from dataclasses import replace
from itertools import zip_longest
from typing import Any

from merakc.errors import RecordError
from merakc.frontend.values.reads import Reads
from merakc.ir.graph import Graph, InputKind, Node, OutputKind, Ref, TensorSpec, map_refs
from merakc.kernels.opaque import OPAQUE
from merakc.passes.batches.aligned import aligned, common
from merakc.passes.batches.routed import JOINS, UNBIND


class OtherPathError(RecordError):
    """A forward that does something else for another number of samples."""


# Calls of torch's that are other ops for many samples, and what to give them.
WAYS = {
    "aten._cdist_forward.default": ", as torch.cdist does where it is given no compute_mode "
    "('use_mm_for_euclid_dist', or 'donot_use_mm_for_euclid_dist')"
}


def _without_results(graph: Graph) -> Graph:
    kept = tuple(o for o in graph.outputs if o.kind is not OutputKind.RESULT)
    return replace(graph, outputs=kept).pruned()


def in_common(part: Graph, whole: Graph) -> tuple[Graph, Graph]:
    """Both graphs as they are where they are the same calls; or with what the batch alone says as
    values of the whole batch, where only that is made otherwise. What leaves them beside the loss
    is left out where it is another number of tensors for the whole batch.
    """
    leaving = [[(o.name, o.kind) for o in g.outputs] for g in (part, whole)]
    if leaving[0] != leaving[1]:
        part, whole = _without_results(part), _without_results(whole)
    try:
        check_alike(part, whole, 1, 2)
    except RecordError:
        return aligned(part, whole, same_call)
    return part, whole


def check_alike(part: Graph, whole: Graph, samples: int, total: int) -> None:
    """Raises `RecordError` where the forward does something else for another number of samples."""
    part, whole = common(part), common(whole)
    for node, other in zip(part.nodes, whole.nodes, strict=False):
        if not _same(node, other):
            raise _other_path(node, samples, total)
    if len(part.nodes) != len(whole.nodes):
        longer = max(part.nodes, whole.nodes, key=len)
        raise _other_path(longer[min(len(part.nodes), len(whole.nodes))], samples, total)
    if part.outputs != whole.outputs or [(i.name, i.kind, i.target) for i in part.inputs] != [
        (i.name, i.kind, i.target) for i in whole.inputs
    ]:
        raise _other_path(part.nodes[-1], samples, total)


def _same(node: Node, other: Node) -> bool:
    """Whether two calls are the same, but for their sizes and numbers, and for how many samples
    they take apart, put together or go through.
    """
    return node.name == other.name and _refs_alike(node, other) and same_call(node, other)


def _refs_alike(node: Node, other: Node) -> bool:
    if node.op in (*JOINS, OPAQUE) and len(node.refs) != len(other.refs):
        return {r.node for r in node.refs} == {r.node for r in other.refs}
    return node.refs == other.refs


def same_call(node: Node, other: Node) -> bool:
    """Whether two calls are the same, but for their names, sizes and numbers, and what they
    read.
    """
    outputs = [[o and (o.dtype, len(o.shape)) for o in n.outputs] for n in (node, other)]
    if node.op == UNBIND:
        outputs = [o[:1] for o in outputs]
    return node.op == other.op and outputs[0] == outputs[1]


def _other_path(node: Node, samples: int, total: int) -> RecordError:
    return OtherPathError(
        f"{node.source}: for a part of {samples} samples the forward does something else than for "
        f"the whole batch of {total}, in module '{node.module}' ({node.op}): it goes through the "
        f"samples one by one, or asks for their number{WAYS.get(node.op, '')}; compute over all "
        "samples at once, or train with dp=1 and micro_batches=1"
    )


def of_one_sample(alone: Graph, two: Graph, many: Graph, samples: int) -> Graph:
    """The recording of one sample, `alone`, or what the recordings of two and of `samples` say of
    one where that is another.

    A batch of one sample often takes a path of its own: of what it turns torch makes no copy, and
    a model may take it for several texts in a row. As a part of a larger batch it is to take the
    batch's path, on which sizes grow evenly with the samples. Raises `RecordError` where some do
    not, calls are recorded with their sizes, or custom functions are called in another way.
    """
    try:
        check_alike(alone, two, 1, samples)
    except RecordError:
        check_alike(two, many, 2, samples)
        made = _Line(samples).graph(two, many)
        if made is None or _functions(made) != _functions(alone):
            raise
        return made
    return alone


def _functions(graph: Graph) -> list[tuple[Any, ...]]:
    """The calls of custom functions, by what they are given and return."""
    specs, given = graph.specs(), lambda ref: specs[ref]
    return [
        (n.op, graph.functions[n.op], map_refs(n.args, given), n.outputs)
        for n in graph.nodes
        if n.op in graph.functions
    ]


class _Line:
    """Takes sizes for one sample from those for two and for `samples`; None where they are not on
    a line.
    """

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def graph(self, two: Graph, many: Graph) -> Graph | None:
        """The graph of one sample."""
        if any(n.op == OPAQUE for n in two.nodes):  # a call as it was recorded
            return None
        inputs = []
        for item, other in zip(two.inputs, many.inputs, strict=True):
            spec = self.spec(item.spec, other.spec)
            if spec is None or (item.kind is InputKind.CONSTANT and item.spec != other.spec):
                return None
            inputs.append(replace(item, spec=spec))
        nodes = []
        for node, twin in zip(two.nodes, many.nodes, strict=True):
            if len(node.outputs) != len(twin.outputs):  # samples that are taken apart
                return None
            specs = [self.spec(a, b) for a, b in zip(node.outputs, twin.outputs, strict=True)]
            if any(s is None and o is not None for s, o in zip(specs, node.outputs, strict=True)):
                return None
            args, kwargs = self.value(node.args, twin.args), self.value(node.kwargs, twin.kwargs)
            nodes.append(replace(node, args=args, kwargs=kwargs, outputs=tuple(specs)))
        return replace(two, inputs=tuple(inputs), nodes=tuple(nodes))

    def spec(self, two: TensorSpec | None, many: TensorSpec | None) -> TensorSpec | None:
        """The spec of one sample's value."""
        if two is None or many is None or len(two.shape) != len(many.shape):
            return None
        shape = [self.size(a, b) for a, b in zip(two.shape, many.shape, strict=True)]
        return None if None in shape else TensorSpec(tuple(s or 0 for s in shape), two.dtype)

    def size(self, two: int, many: int) -> int | None:
        """A size for one sample."""
        each, rest = divmod(many - two, self.samples - 2)
        return None if rest or each > two else two - each

    def value(self, two: Any, many: Any) -> Any:
        """An argument for one sample; a number that is on no line stays, and the algebra takes it
        from the whole batch or couples.
        """
        if isinstance(two, Ref):
            return two
        if isinstance(two, tuple) and isinstance(many, tuple) and len(two) == len(many):
            return tuple(self.value(a, b) for a, b in zip(two, many, strict=True))
        if type(two) is int and type(many) is int:
            found = self.size(two, many)
            return two if found is None else found
        return two


def check_read_alike(one: Reads | None, two: Reads | None) -> None:
    """Raises `RecordError` where Python reads something else of two samples than of one, for which
    the calls of two are taken.
    """
    told = [[(r.source, r.answer) for r in reads.asked] if reads else [] for reads in (one, two)]
    if told[0] != told[1]:
        source, answer = next(b for a, b in zip_longest(*told) if a != b) or told[0][-1]
        raise RecordError(
            f"{source}: the forward reads a number ({answer}) of its batch that it does not read "
            "alike of one sample and of two, and a micro-batch has one; give micro-batches more "
            "samples, or run the batch whole (dp=1 and micro_batches=1)"
        )
