"""One node alone: its sharding row, with its arguments' samples marked.

The rules of sharding say which dims of a call are the same, which are summed over and which are
needed whole. Of the samples they say it just as well: a dim of samples that a row keeps makes rows,
one that it sums over a sum, and one that it needs whole, divides or joins with a second couples.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from merakc.ir.graph import Graph, Node, Ref
from merakc.passes.batches.states import (
    SAMPLES,
    Dim,
    Kind,
    Outcome,
    State,
    coupled,
    sums,
)
from merakc.passes.sharding.dims import Dims, given
from merakc.passes.sharding.factors import Factor, leaves
from merakc.passes.sharding.propagate import apply_row
from merakc.passes.sharding.rows import Loss, Reduce
from merakc.passes.sharding.rules import row_of

MEAN = 1  # torch's code for a loss's reduction
# Sums over a dim of samples to which they add an argument, which would count in every part.
WITH_BIAS = ("aten.addmm.default", "aten.linear.default")
# Their rows say that a table's rows can lie on several ranks, each with the indices of all.
TABLES = ("aten.embedding.default",)


def by_row(graph: Graph, node: Node, states: Mapping[Ref, State], samples: int) -> Outcome:
    """The outcome of a node by the sharding row of its op.

    `states` are those of its arguments, with dims; `samples` is the number in a part, 2 or more.
    """
    row = row_of(node.op)
    if row is None:
        return coupled(node, "no rule says what it does to samples")
    specs = graph.specs()
    refs = [*node.refs, *(Ref(node.name, k) for k, o in enumerate(node.outputs) if o is not None)]
    dims = Dims(graph, {r: specs[r].shape for r in refs}, {r: specs[r].dtype for r in refs})
    marked: list[Factor] = []
    for ref in dict.fromkeys(node.refs):
        dims.of[ref] = [_factors(d, samples, marked) for d in states[ref].dims or ()]
    try:
        apply_row(dims, node, row)
    except (AssertionError, IndexError, TypeError, ValueError, KeyError) as error:
        return coupled(node, f"its rule does not fit ({type(error).__name__})")
    roots = {f.root() for f in marked}
    if any(r.blocked or r.parts or r.segments for r in roots):
        return coupled(node, "samples are needed whole, or in other groups")
    if node.op in TABLES and any(SAMPLES in d for d in states[node.refs[0]].dims or ()):
        return coupled(node, "each sample reads others")
    found, kept = _outputs(dims, node, roots)
    if any(sum(d.count(SAMPLES) for d in s.dims or ()) > 1 for s in found if s is not None):
        return coupled(node, "samples meet other samples")
    gone = {f for d in dims.summed.get(node.name, []) for f in leaves(d)} & roots
    if not roots:
        return Outcome(found)
    if len(roots) > 1 or bool(kept) == bool(gone):
        return coupled(node, "samples meet other samples")
    if kept:
        return Outcome(found)
    if node.op in WITH_BIAS and len(node.refs) > 2:
        return coupled(node, "a bias is added to a sum over samples")
    mean = isinstance(row, Reduce) and row.combine == "mean"
    return sums(node, scaled=mean or (isinstance(row, Loss) and given(node, "reduction") == MEAN))


def _factors(dim: Dim, samples: int, marked: list[Factor]) -> list[Factor]:
    found = []
    for atom in dim:
        if atom == SAMPLES:
            found.append(Factor(samples))
            marked.append(found[-1])
        elif atom != 1:
            found.append(Factor(int(atom)))
    return found


def _outputs(
    dims: Dims, node: Node, roots: set[Factor]
) -> tuple[tuple[State | None, ...], set[Factor]]:
    """The states of the outputs where they are rows or constants, and the samples among them."""
    found: list[State | None] = []
    kept: set[Factor] = set()
    for k, spec in enumerate(node.outputs):
        if spec is None:
            found.append(None)
            continue
        own = [leaves(d) for d in dims.of[Ref(node.name, k)]]
        kept |= {f for d in own for f in d} & roots
        now: Any = tuple(tuple(SAMPLES if f in roots else f.size for f in d) for d in own)
        kind = Kind.ROWS if any(SAMPLES in d for d in now) else Kind.CONSTANT
        found.append(State(kind, now))
    return tuple(found), kept
