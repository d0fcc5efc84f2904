"""Splits a backward in two: what other stages wait for, and what only the weights want.

Zero-bubble schedules run the first part at once and the second whenever a rank would idle
(Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, section 2).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from merakc.ir.graph import Graph, Input, InputKind, Node, Output, OutputKind, Ref
from merakc.ir.program import StageGraphs

CONVOLUTION = "aten.convolution_backward.default"
SCORES = "merakc.scores_backward.default"


def split_backward(stage: StageGraphs) -> tuple[Graph, Graph]:
    """The input-gradient and the weight-gradient graph of a stage that has a backward.

    The first computes the gradients of the stage's `ACTIVATION` inputs, the second all others;
    every node of the backward is in exactly one of them, but for those of convolutions and of
    scores that are made again, which become two. Values of the first that the second reads pass
    between them as outputs and inputs of kind `SAVED`, named as between forward and backward: the
    output after the value, the input `saved:` and that, with the output as its target. Where the
    stage receives no activation, the first graph is empty.
    """
    assert stage.backward is not None, "nothing in this stage requires a gradient"
    arrived = {i.name for i in stage.forward.inputs if i.kind is InputKind.ACTIVATION}
    whole = _apart(stage.backward) if arrived else stage.backward
    sent = tuple(o for o in whole.outputs if o.name in arrived)
    own = tuple(o for o in whole.outputs if o.name not in arrived)
    first = replace(whole, outputs=sent).pruned().nodes
    names = {n.name for n in first}
    second = [n for n in whole.nodes if n.name not in names]
    read = dict.fromkeys([r for n in second for r in n.refs] + [o.ref for o in own])
    passed = [r for r in read if r.node in names]
    specs = whole.specs()
    kept = tuple(Output(str(r), OutputKind.SAVED, r) for r in passed)
    given = {r: Input(f"saved:{r}", InputKind.SAVED, specs[r], str(r)) for r in passed}
    weight_grad = _part(whole, second, own).renamed({r: Ref(i.name) for r, i in given.items()})
    return (
        _part(whole, first, (*sent, *kept)),
        replace(weight_grad, inputs=(*weight_grad.inputs, *given.values())),
    )


def _apart(graph: Graph) -> Graph:
    """The graph with the input and weight gradients apart of each call that makes both."""
    nodes: list[Node] = []
    names: dict[Ref, Ref] = {}
    for node in graph.nodes:
        halves = _halves(node)
        if halves is None:
            nodes.append(node)
            continue
        at, first, second = halves
        own = f"{node.name}.weight"
        outs = list(enumerate(node.outputs))
        nodes += [
            replace(node, args=first, outputs=tuple(o if k == at else None for k, o in outs)),
            replace(
                node, name=own, args=second,
                outputs=tuple(None if k == at else o for k, o in outs),
            ),
        ]  # fmt: skip
        names |= {Ref(node.name, k): Ref(own, k) for k, _ in outs if k != at}
    return replace(graph, nodes=tuple(nodes)).renamed(names)


def _halves(node: Node) -> tuple[int, tuple[Any, ...], tuple[Any, ...]] | None:
    """Of a call that makes gradients of its input and of weights: which result the first is, and
    the arguments with which it makes each alone.
    """
    if node.op == CONVOLUTION:
        before, (of_input, *others) = node.args[:-1], node.args[-1]
        if of_input and any(others):
            return 0, (*before, (True, False, False)), (*before, (False, *others))
    if node.op == SCORES:
        before, (weight, of_input, bias) = node.args[:-3], node.args[-3:]
        if of_input and (weight or bias):
            return 1, (*before, False, True, False), (*before, weight, False, bias)
    return None


def _part(whole: Graph, nodes: Sequence[Node], outputs: Collection[Output]) -> Graph:
    """Some of a graph's nodes, with the inputs that they read."""
    part = replace(whole, nodes=tuple(nodes), outputs=tuple(outputs))
    return part.without_unread_inputs()
