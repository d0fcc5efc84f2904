"""Numbers in a recorded loss that are the size of the batch, told from those that are weights.

`x.sum() * (1 / len(x))` and `x.sum() * 0.25` leave the same node in a recording of four samples,
and only the first is an average. The same forward recorded for twice the samples shows which.
"""

from __future__ import annotations

from dataclasses import replace
from math import isclose

from merakc.errors import RecordError
from merakc.ir.graph import Graph, Node, OutputKind, Ref
from merakc.passes.weigh_loss import ADDED, DIV, LINEAR, MUL, OF_ONE, STACK

MEAN, SUM = "aten.mean.default", "aten.sum.default"


def has_numbers(graph: Graph) -> bool:
    """Whether a term of the loss is multiplied or divided by a number."""
    return any(_factor(node) is not None for node in _terms(graph))


def settle_numbers(graph: Graph, wide: Graph, samples: int) -> Graph:
    """The graph, of so many samples, with every average of a sum written as a division by that
    number, and every plain weight as a product. `wide` is of twice the samples.

    Raises `RecordError` for a number that grows with the batch in a way that no sum has.
    """
    others = {node.name: node for node in wide.nodes}
    producers = {node.name: node for node in graph.nodes}
    specs = graph.specs()
    written: dict[str, list[Node]] = {}
    for node in _terms(graph):
        factor, other = _factor(node), others.get(node.name)
        wider = None if other is None or other.op != node.op else _factor(other)
        if factor is None or wider is None:
            continue
        term = _term(node)
        if isclose(wider, factor):
            written[node.name] = [replace(node, op=MUL, args=(term, factor))]
        elif abs(wider) < abs(factor):
            name = f"{node.name}.weight"
            weighed = replace(node, name=name, op=MUL, args=(term, factor * samples))
            written[node.name] = [weighed, replace(node, op=DIV, args=(Ref(name), samples))]
        else:
            mean = producers.get(term.node)
            if mean is None or mean.op != MEAN or not isclose(wider, 2 * factor):
                raise _unclear(node, factor, wider, samples)
            name = f"{mean.name}.total.{node.name}"
            number = factor / specs[mean.refs[0]].numel
            total = replace(mean, name=name, op=SUM)
            written[node.name] = [total, replace(node, op=MUL, args=(Ref(name), number))]
    nodes = tuple(made for node in graph.nodes for made in written.get(node.name, [node]))
    return replace(graph, nodes=nodes).pruned() if written else graph


def _terms(graph: Graph) -> list[Node]:
    """The nodes that the loss is a linear function of, number by number."""
    producers = {node.name: node for node in graph.nodes}
    specs, grads = graph.specs(), graph.grad_values()
    waiting = [o.ref for o in graph.outputs if o.kind is OutputKind.LOSS]
    found: dict[str, Node] = {}
    while waiting:
        ref = waiting.pop()
        node = producers.get(ref.node)
        if node is None or ref not in grads or specs[ref].numel != 1 or node.name in found:
            continue
        if node.op in LINEAR | ADDED | OF_ONE | {STACK, SUM, MEAN}:
            found[node.name] = node
            waiting += node.refs
    return list(found.values())


def _unclear(node: Node, factor: float, wider: float, samples: int) -> RecordError:
    return RecordError(
        f"{node.source}: the loss is scaled by {factor:g} for {samples} samples and by {wider:g} "
        f"for {2 * samples}, so that the losses of micro-batches do not add up to that of the "
        "batch; divide a sum by the number of samples, or take a mean"
    )


def _term(node: Node) -> Ref:
    return next(a for a in node.args if isinstance(a, Ref))


def _factor(node: Node) -> float | None:
    """The number that a node multiplies one value by, if that is all that it does."""
    numbers = [a for a in node.args if not isinstance(a, Ref)]
    if node.op not in (MUL, DIV) or node.kwargs or len(numbers) != 1:
        return None
    (number,) = numbers
    if not isinstance(number, (int, float)) or isinstance(number, bool) or number == 0:
        return None
    if node.op == MUL:
        return float(number)
    return 1 / number if node.args[1] is number else None
