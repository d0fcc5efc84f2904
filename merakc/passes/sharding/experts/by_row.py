"""Whether a call computes each row by itself."""

from __future__ import annotations

from collections.abc import Mapping, Set

from merakc.ir.graph import Graph, Input, InputKind, Node, Ref, TensorSpec, map_refs
from merakc.passes.sharding.factors import leaves
from merakc.passes.sharding.propagate import propagate


def by_row(node: Node, rows: Set[Ref], specs: Mapping[Ref, TensorSpec]) -> bool:
    """Whether a node makes each row of its results of the same row of those of its arguments."""
    alias = {ref: Ref(f"x{k}") for k, ref in enumerate(dict.fromkeys(node.refs))}
    inputs = tuple(Input(a.node, InputKind.ACTIVATION, specs[r]) for r, a in alias.items())
    args, kwargs = map_refs((node.args, node.kwargs), alias.__getitem__)
    alone = node.reading(args, kwargs)
    dims = propagate(Graph(inputs, (alone,), ()))
    if dims.opaque:
        return False
    made = [dims.of[ref] for ref in node.made]
    owns = [dims.of[a] for r, a in alias.items() if r in rows]
    others = [d for r, a in alias.items() if r not in rows for d in dims.of[a]]
    behind = [d for dim in owns for d in dim[1:]]
    barred = {f for d in (*others, *behind, *dims.summed.get(node.name, ())) for f in leaves(d)}
    if not owns or not all((*owns, *made)):  # a number has no rows
        return False
    firsts = [leaves(dim[0]) for dim in (*owns, *made)]
    row = firsts[0]
    alike = all(first == row for first in firsts) and barred.isdisjoint(row)
    return alike and not any(f.blocked or f.segments for f in row)
