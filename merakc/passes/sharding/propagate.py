"""Carries factors through a graph: which dims of which values are one and the same.

Nothing here knows a model: head counts, grouped key/value heads and packed projections appear
where reshapes, splits and products divide and join dims.
"""

from __future__ import annotations

from merakc.errors import RuleError
from merakc.ir.graph import Graph, InputKind, Node, Ref
from merakc.kernels.ops import resolve_op
from merakc.passes.sharding.compute_rules import COMPUTE_RULES
from merakc.passes.sharding.dims import (
    Dims,
    argument,
    broadcast,
    broadcast_dims,
    given,
    merged,
    named_dims,
    need_whole,
    opaque,
)
from merakc.passes.sharding.factors import Dim, new_dim, size, unify
from merakc.passes.sharding.notation import TENSORS
from merakc.passes.sharding.rows import POINTWISE, Along, Last, Loss, Reduce, Row, Whole
from merakc.passes.sharding.rules import is_registered, row_of
from merakc.passes.sharding.view_rules import VIEW_RULES

WHOLE = "!"
COPY = "aten.clone.default"


def copies(graph: Graph) -> frozenset[str]:
    """The nodes that copy a tensor of the batch, which all ranks have: each may copy a part."""
    batch = {Ref(i.name) for i in graph.inputs if i.kind is InputKind.BATCH}
    return frozenset(n.name for n in graph.nodes if n.op == COPY and n.args[0] in batch)


def propagate(graph: Graph) -> Dims:
    """The factors of every value of the graph."""
    specs = graph.specs()
    shapes = {ref: spec.shape for ref, spec in specs.items()}
    dims = Dims(graph, shapes, {ref: spec.dtype for ref, spec in specs.items()})
    for item in graph.inputs:
        whole = "a dim of the batch" if item.kind is InputKind.BATCH else ""
        dims.fresh(Ref(item.name), whole)
    for node in graph.nodes:
        row = row_of(node.op)
        if node.name in graph.told(copies):
            dims.fresh(Ref(node.name))
        elif row is None:
            dims.opaque.append(node)
            opaque(dims, node)
        elif is_registered(node.op):
            try:
                apply_row(dims, node, row)
            except (AssertionError, IndexError, TypeError, ValueError) as error:
                raise _misfit(dims, node, row) from error
        else:
            apply_row(dims, node, row)
    return dims


def _misfit(dims: Dims, node: Node, row: Row) -> RuleError:
    given = ", ".join(str(list(dims.shapes[ref])) for ref in node.refs)
    made = ", ".join(str(list(o.shape)) for o in node.outputs if o is not None)
    return RuleError(
        f"{node.source}: the sharding rule of {node.op}, {row!r}, does not fit this call: "
        f"{given} -> {made}; register one that does, or 'whole(why)'"
    )


def apply_row(dims: Dims, node: Node, row: Row) -> None:
    """Gives the outputs of a node their dims, in terms of those of its arguments."""
    if row == POINTWISE:
        _pointwise(dims, node)
    elif isinstance(row, str):
        _einsum(dims, node, row)
    elif isinstance(row, Along):
        _along(dims, node, row)
    elif isinstance(row, Last):
        _last(dims, node, row)
    elif isinstance(row, Reduce):
        _reduce(dims, node, row)
    elif isinstance(row, Loss):
        _loss(dims, node)
    elif isinstance(row, Whole):
        opaque(dims, node, f"{row.why}: {node.op}")
    else:
        rule = VIEW_RULES.get(row.name) or COMPUTE_RULES[row.name]
        rule(dims, node)


def _pointwise(dims: Dims, node: Node) -> None:
    for index, spec in enumerate(node.outputs):
        if spec is not None:
            dims.put(node, broadcast(dims, list(node.refs), spec.shape), index)


def tensor_arguments(op: str) -> list[tuple[int, str]]:
    """Position and name of the arguments that are tensors, in order."""
    arguments = resolve_op(op)._schema.arguments  # type: ignore[attr-defined]
    return [(k, a.name) for k, a in enumerate(arguments) if str(a.type) in TENSORS]


def _einsum(dims: Dims, node: Node, row: str) -> None:
    left, right = row.split("->")
    letters: dict[str, Dim] = {}
    leads: list[list[Dim]] = []
    for part, (k, name) in zip(left.split(","), tensor_arguments(node.op), strict=False):
        arg = argument(node, k, name)
        if arg is None:
            assert "?" in part, f"{node}: argument {name} is missing"
            continue
        names = part.replace("?", "").split()
        own = dims.of[arg]
        if names[:1] == ["..."]:
            names = names[1:]
            leads.append(own[: len(own) - len(names)])
            own = own[len(own) - len(names) :]
        for name, dim in zip(names, own, strict=True):
            letter = name.rstrip(WHOLE)
            letters[letter] = merged(letters.get(letter, []), dim)
            if name.endswith(WHOLE):
                need_whole(dim, node)
    dots = broadcast_dims(leads, max(map(len, leads), default=0))
    kept: set[str] = set()
    for index, part in enumerate(right.split(",")):
        out: list[Dim] = []
        for name in part.split():
            out += dots if name == "..." else [letters[name]]
        kept.update(part.split())
        dims.put(node, out, index)
    dims.summed[node.name] = [dim for letter, dim in letters.items() if letter not in kept]


def _along(dims: Dims, node: Node, row: Along) -> None:
    """Arguments of another rank than the first (indices) are needed whole."""
    first = dims.of[node.refs[0]]
    chosen = named_dims(node, row.argument, len(first))
    alike = []
    for ref in node.refs:
        own = dims.of[ref]
        if len(own) == len(first):
            alike.append(own)
        for k, dim in enumerate(own):
            if k in chosen or len(own) != len(first):
                need_whole(dim, node)
    out = list(first)
    for k in set(range(len(first))) - chosen:
        if len({size(own[k]) for own in alike}) > 1:  # the first of the larger one are meant
            for own in alike:
                need_whole(own[k], node)
        else:
            for own in alike[1:]:
                unify(first[k], own[k])
    for index, spec in enumerate(node.outputs):
        if spec is not None:
            same = [size(d) == full for d, full in zip(out, spec.shape, strict=True)]
            if row.cut:
                same = [s and k not in chosen for k, s in enumerate(same)]
            fresh = [new_dim(full, "" if row.cut else node.op) for full in spec.shape]
            dims.put(node, [d if s else f for d, s, f in zip(out, same, fresh, strict=True)], index)


def _last(dims: Dims, node: Node, row: Last) -> None:
    leads = [dims.of[ref][: -row.count] for ref in node.refs]
    if len({tuple(map(size, lead)) for lead in leads}) > 1:
        opaque(dims, node)
        return
    for ref, lead in zip(node.refs, leads, strict=True):
        for dim in dims.of[ref][-row.count :]:
            need_whole(dim, node)
        for mine, first in zip(lead, leads[0], strict=True):
            unify(first, mine)
    for index, spec in enumerate(node.outputs):
        if spec is not None:
            rest = spec.shape[len(leads[0]) :]
            dims.put(node, [*leads[0], *(new_dim(full, node.op) for full in rest)], index)


def _reduce(dims: Dims, node: Node, row: Reduce) -> None:
    own = dims.of[node.refs[0]]
    chosen = named_dims(node, "dim", len(own))
    gone = [d for k, d in enumerate(own) if k in chosen]
    for ref in node.refs[1:]:
        gone += dims.of[ref]
    if row.combine:
        dims.summed[node.name] = gone
    else:
        for dim in gone:
            need_whole(dim, node)
    for index, spec in enumerate(node.outputs):
        if spec is None:
            continue
        keep = len(spec.shape) == len(own)
        out = [[] if k in chosen else d for k, d in enumerate(own) if keep or k not in chosen]
        dims.put(node, out, index)


def _loss(dims: Dims, node: Node) -> None:
    owns = [dims.of[ref] for ref in node.refs]
    every = broadcast_dims(owns, max(map(len, owns)))
    if given(node, "reduction"):
        dims.summed[node.name] = every
        every = []
    dims.put(node, every)
