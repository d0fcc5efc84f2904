"""Splits a backward in two: what other stages wait for, and what only the weights want.

Zero-bubble schedules run the first part at once and the second whenever a rank would idle
(Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, section 2).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence, Set
from dataclasses import replace
from typing import Any

from merakc.analysis.aliases import is_view, view_roots
from merakc.analysis.minimum_cut import MinimumCut
from merakc.costs.work.flops import COLLECTIVES, node_flops
from merakc.ir.graph import Graph, Input, InputKind, Node, Output, OutputKind, Ref
from merakc.ir.program import StageGraphs
from merakc.kernels.opaque import OPAQUE_BACKWARD

CONVOLUTION = "aten.convolution_backward.default"
SCORES = "merakc.scores_backward.default"
# What is held for a backward until it has been read; all else is there for the whole step.
WAITING = (InputKind.SAVED, InputKind.ACTIVATION, InputKind.TANGENT)


def split_backward(stage: StageGraphs) -> tuple[Graph, Graph]:
    """The input-gradient and the weight-gradient graph of a stage that has a backward.

    The first computes the gradients of the stage's `ACTIVATION` inputs, the second all others, but
    for what is computed at once so that less waits for it (`_at_once`); every node of the backward
    is in exactly one of them, but for those of convolutions and of scores that are made again,
    which become two. Values of the first that the second reads pass
    between them as outputs and inputs of kind `SAVED`, named as between forward and backward: the
    output after the value, the input `saved:` and that, with the output as its target. Where the
    stage receives no activation, the first graph is empty.
    """
    assert stage.backward is not None, "nothing in this stage requires a gradient"
    arrived = {i.name for i in stage.forward.inputs if i.kind is InputKind.ACTIVATION}
    whole = _apart(stage.backward) if arrived else stage.backward
    sent = tuple(o for o in whole.outputs if o.name in arrived)
    own = tuple(o for o in whole.outputs if o.name not in arrived)
    names = _behind(whole, (o.ref for o in sent))
    names |= _behind(whole, map(Ref, _at_once(whole, names, own))) if sent else set()
    first = [n for n in whole.nodes if n.name in names]
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


def _behind(graph: Graph, refs: Iterable[Ref]) -> set[str]:
    """The nodes that values are computed by."""
    read = {ref.node for ref in refs}
    found = set()
    for node in reversed(graph.nodes):
        if node.name in read:
            found.add(node.name)
            read.update(ref.node for ref in node.refs)
    return found


def _at_once(whole: Graph, first: Set[str], outputs: Iterable[Output]) -> set[str]:
    """The nodes of the second graph, but for views, that are better run in the first: fewer bytes
    wait for the second then, the fewest that are possible (a minimum cut). The sum that is the
    gradient of a norm's weight would otherwise wait with two values that are as large as a batch.

    What fills idle time stays: products and opaque parts; and collectives, which would be waited
    for.
    """
    specs, roots, cut = whole.specs(), view_roots(whole), MinimumCut()
    there = {i.name for i in whole.inputs if i.kind not in WAITING}
    later = {n.name: n for n in whole.nodes if n.name not in first and not is_view(n)}

    def wait(ref: Ref, reader: str) -> None:
        """A value that is made in the first graph waits for a reader in the second."""
        value = roots.get(ref, ref)
        if value.node not in there:
            maker = value.node if value.node in later else "source"
            cut.add(maker, f"held:{value}", specs[value].size_bytes)
            cut.add(f"held:{value}", reader)

    for name, node in later.items():
        fills = node_flops(node, specs) or node.op == OPAQUE_BACKWARD or node.op in COLLECTIVES
        if fills:
            cut.add(name, "sink")
        for ref in node.refs:
            wait(ref, name)
            if (value := roots.get(ref, ref)).node in later:
                cut.add(name, value.node)
    for out in outputs:
        wait(out.ref, "sink")
    return later.keys() & cut.source_side()[0]


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
