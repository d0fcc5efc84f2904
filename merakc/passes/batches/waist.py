"""Where the parts end and the head begins: the smallest cut of values before what couples."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from merakc.ir.graph import InputKind, Node, Ref
from merakc.kernels.draws import KEY_POSITION
from merakc.kernels.opaque import OPAQUE
from merakc.kernels.ops import is_pointwise
from merakc.passes.batches.analyse import Analysis
from merakc.passes.batches.states import Kind

if TYPE_CHECKING:
    import networkx as nx


@dataclass(frozen=True)
class Waist:
    """The values that the parts hand over, and the nodes behind them, by name."""

    values: tuple[Ref, ...]
    head: frozenset[str]


def find_waist(found: Analysis, roots: Sequence[Ref]) -> Waist:
    """The waist before `roots`, which the head gives: a minimum cut, in bytes of the whole batch.

    The parts keep what multiplies by matrices of parameters, draws, or runs as it is, unless it
    stands behind the coupling; what is of the batch alone is known to both.
    """
    import networkx as nx  # few losses couple samples

    net, needed = _network(found, roots, of_parameters(found))
    values: tuple[Ref, ...] = ()
    if "source" in net and "sink" in net:
        _, (left, _) = nx.minimum_cut(net, "source", "sink")
        values = tuple(r for r in needed if (r, "in") in left and (r, "out") not in left)
    return Waist(values, _behind(found, roots, set(values)))


def _network(
    found: Analysis, roots: Sequence[Ref], made: Collection[Ref]
) -> tuple[nx.DiGraph, list[Ref]]:
    """The values between the parts' own work and what couples; a value's edge holds its bytes."""
    import networkx as nx

    specs, net = found.whole.specs(), nx.DiGraph()
    needed: dict[Ref, None] = {}
    waiting = list(roots)
    while waiting:
        ref = waiting.pop()
        state = found.states[ref]
        if ref in needed or state.known:
            continue
        needed[ref] = None
        node = found.makers.get(ref.node)
        coupled = state.kind is Kind.COUPLED
        if coupled or ref in roots:
            net.add_edge((ref, "out"), "sink")
        if state.routed:  # in no order that joins: what it is made of is handed over
            net.add_edge((ref, "in"), (ref, "out"))
        elif not coupled:
            # of equal ones the first: a sum, and not what parts would divide it by
            later = node is not None and any(found.states[r].kind is Kind.SUM for r in node.refs)
            bytes_ = specs[ref].size_bytes + 1 + later
            net.add_edge((ref, "in"), (ref, "out"), capacity=bytes_)
            if node is None or is_work(found, node, made):
                net.add_edge("source", (ref, "in"))
                continue
        assert node is not None, "an input that couples"
        for r in node.refs:
            net.add_edge((r, "out"), (ref, "out") if coupled else (ref, "in"))
            waiting.append(r)
    return net, list(needed)


def of_parameters(found: Analysis) -> set[Ref]:
    """The parameters, and what is made of them alone."""
    made = {Ref(i.name) for i in found.part.inputs if i.kind is InputKind.PARAMETER}
    for node in found.part.nodes:
        unknown = [r for r in node.refs if not found.states[r].known]
        if unknown and made.issuperset(unknown) and node.op not in KEY_POSITION:
            made.update(
                Ref(node.name, k)
                for k, o in enumerate(node.outputs)
                if o is not None and found.states[Ref(node.name, k)].kind is Kind.CONSTANT
            )
    return made


def is_work(found: Analysis, node: Node, made: Collection[Ref]) -> bool:
    """Whether a node is of the model's body: it multiplies by a matrix of parameters, draws, or
    runs as it is. `made` are the values made of parameters alone.
    """
    if node.op in KEY_POSITION or is_unseen(node):
        return True
    if is_pointwise(node.op) or all(r in made for r in node.refs):
        return False
    specs = found.part.specs()
    return any(r in made and len(specs[r].shape) > 1 for r in node.refs)


def is_unseen(node: Node) -> bool:
    """Whether a node runs code of the user's as it is."""
    return node.op == OPAQUE or node.op.startswith("function.")


def _behind(found: Analysis, roots: Sequence[Ref], waist: set[Ref]) -> frozenset[str]:
    """The nodes of the head."""
    head: set[str] = set()
    waiting = [r for r in roots if r not in waist]
    while waiting:
        ref = waiting.pop()
        if ref.node in head or found.states[ref].known or ref in waist:
            continue
        node = found.makers.get(ref.node)
        assert node is not None, f"{ref} is before the waist"
        head.add(node.name)
        waiting += node.refs
    return frozenset(head)
