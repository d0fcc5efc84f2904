"""Values whose samples are not in their order: sorted by expert, or each by itself.

A mixture of experts sorts rows by their expert, multiplies them in groups and puts them back. What
lies between depends on the samples' order and number, and what comes back is rows again. The same
holds of samples that are taken apart (`unbind`) and put together in order. A state's `routed` says
what such a value is: a tag, the node that sorted or took apart, and numbers.

- `("order", n)`: the permutation of the rows of sort n;
- `("source", n, k)`: the row that each of k copies came from;
- `("sorted", n)`: what was sorted by, in that order; `("counts", n)`: what follows from it alone;
- `("rows", n)`: values in the sorted order;
- `("back", n)`: the inverse permutation;
- `("sample", n)`: the samples that node n has taken apart.
"""

from __future__ import annotations

import math

from merakc.ir.graph import Node, Ref
from merakc.kernels.draws import KEY_POSITION
from merakc.passes.batches.own_rules import COUNTS, Place
from merakc.passes.batches.states import SAMPLES, Dim, Kind, Outcome, State, coupled, every
from merakc.passes.sharding.dims import given
from merakc.passes.sharding.experts.by_row import by_row
from merakc.passes.sharding.experts.ends import DIVISIONS, GROUPED, SORTS, ends_where_experts_do
from merakc.passes.sharding.rows import POINTWISE
from merakc.passes.sharding.rules import row_of

JOINS = ("aten.cat.default", "aten.stack.default")
KEPT = ("aten.unsqueeze.default", "aten.split.Tensor", "aten.slice.Tensor")
UNBIND = "aten.unbind.int"


def routed_rule(place: Place) -> Outcome | None:
    """The outcome of a node that routes rows, or that reads routed ones; None for all others."""
    node = place.node
    if node.op in SORTS:
        return _sort(place)
    if node.op == UNBIND:
        x = place.states[node.refs[0]]
        apart = x.dims is not None and x.dims[given(node, "dim")][:1] == (SAMPLES,)
        return Outcome(every(node, _made("sample", node.name))) if apart else None
    states = [place.states[r] for r in node.refs]
    names = {s.routed[1] for s in states if s.routed}
    if not names:
        return None
    if len(names) > 1:
        return coupled(node, "rows of two sorts")
    tags = {s.routed[0] for s in states if s.routed}
    if tags == {"sample"}:
        return _together(place)
    found = _among_rows(place, str(names.pop()), tags)
    return found or coupled(node, f"rows sorted by expert ({', '.join(sorted(map(str, tags)))})")


def _made(*routed: object) -> State:
    return State(Kind.ROWS, routed=routed)


def _sort(place: Place) -> Outcome | None:
    """A sort of whole numbers, one a row of the samples: of rows by their expert."""
    node = place.node
    x = place.states[node.refs[0]]
    if place.part.specs()[node.refs[0]].dtype.is_floating_point or x.known:
        return None
    if x.dims is None or len(x.dims) != 1 or x.dims[0][:1] != (SAMPLES,):
        return None
    order = _made("order", node.name)
    both = (_made("sorted", node.name), order)
    return Outcome((order,) if "argsort" in node.op else both)


def _together(place: Place) -> Outcome:
    """All samples that were taken apart, joined in their order."""
    node = place.node
    apart = place.makers[node.refs[0].node]
    mine = tuple(Ref(apart.name, k) for k in range(len(apart.outputs)))
    x = place.before[apart.refs[0]]
    first = given(node, "dim") == 0 and given(apart, "dim") == 0 if node.op in JOINS else False
    count = len(mine) * place.total // place.samples  # each sample may have several
    every = tuple(Ref(apart.name, k) for k in range(count))
    every_one = first and node.args[0] == mine and place.twin.args[0] == every
    if not every_one or x.dims is None:
        return coupled(node, "some of the samples, each by itself")
    if "stack" in node.op:
        return Outcome((State(Kind.ROWS, x.dims),))
    return Outcome((State(Kind.ROWS, ((*x.dims[0], *x.dims[1]), *x.dims[2:])),))


def _flat(place: Place, name: str) -> Dim:
    """The factors of the dim that a sort has ordered."""
    dims = place.before[place.makers[name].refs[0]].dims
    assert dims is not None
    return dims[0]


def _among_rows(place: Place, name: str, tags: set[object]) -> Outcome | None:
    """The outcome of a node that reads rows in the order of one sort; None where it couples."""
    node, flat = place.node, _flat(place, name)
    states = [place.states[r] for r in node.refs]
    each = math.prod(int(f) for f in flat[1:])  # rows of one sample
    if node.op in DIVISIONS and tags == {"order"} and isinstance(node.args[1], int):
        copies = node.args[1]
        return Outcome((_made("source", name, copies),)) if each % copies == 0 else None
    if node.op == "aten.index.Tensor" and len(node.args[1]) == 1:
        return _picked(place, name, flat, each)
    if node.op == "aten.index_put.default":
        return _inverse(place, name)
    if tags <= {"sorted", "counts"} and all(s.routed or not s.sampled for s in states):
        own = tags == {"sorted"} and _of_its_own(node, place.samples * each)
        return Outcome(every(node, _made("sorted" if own else "counts", name)))
    if node.op == GROUPED and states[0].routed[:1] == ("rows",):
        by_counts = states[2].routed[:1] == ("counts",)
        fine = by_counts and states[1].kind is Kind.CONSTANT and not states[1].routed
        fine = fine and all(
            ends_where_experts_do(graph, Ref(name), node.refs[2])
            for graph in (place.part, place.whole)
        )
        return Outcome(every(node, _made("rows", name))) if fine else None
    if tags <= {"rows", "sorted"} and all(
        s.routed or (s.kind is Kind.CONSTANT and not s.sampled) for s in states
    ):
        rows = place.samples * each
        same = all(o.shape[:1] == (rows,) for o in node.outputs if o is not None)
        drawn = node.op in KEY_POSITION  # by the number of a sample, which a sorted row has not
        routed = {r for r in node.refs if place.states[r].routed}
        keeps = node.op in KEPT or by_row(node, routed, place.part.specs())
        return Outcome(every(node, _made("rows", name))) if same and keeps and not drawn else None
    return None


def _of_its_own(node: Node, rows: int) -> bool:
    """Whether a node makes one number of each row's expert, and of nothing else."""
    each = row_of(node.op) == POINTWISE and node.op not in KEY_POSITION
    shape = node.spec.shape
    return (each or node.op == KEPT[0]) and len(node.refs) == 1 and (
        shape[:1] == (rows,) and math.prod(shape) == rows
    )  # fmt: skip


def _picked(place: Place, name: str, flat: Dim, each: int) -> Outcome | None:
    """Rows taken in the order of the experts, or taken back out of it."""
    node = place.node
    x, what = place.states[node.args[0]], place.states[node.args[1][0]].routed
    if x.routed[:1] == ("rows",) and what[:1] == ("back",):
        return Outcome((State(Kind.ROWS, (flat, *((n,) for n in node.spec.shape[1:]))),))
    if what[:1] == ("sorted",):  # of each row its expert's own, from a table
        table = x.kind is Kind.CONSTANT and not x.sampled and not x.routed
        return Outcome((_made("rows", name),)) if table else None
    copies = int(str(what[2])) if what[:1] == ("source",) else 1
    if what[:1] not in (("order",), ("source",)) or x.routed or x.dims is None:
        return None
    first = x.dims[0]
    own = first[:1] == (SAMPLES,) and math.prod(int(f) for f in first[1:]) == each // copies
    return Outcome((_made("rows", name),)) if own and x.kind is Kind.ROWS else None


def _inverse(place: Place, name: str) -> Outcome | None:
    """`back[order] = arange(rows)`: the inverse permutation."""
    node = place.node
    indices, values = node.args[1], node.args[2]
    maker = place.makers.get(values.node)
    ordered = len(indices) == 1 and place.states[indices[0]].routed[:1] == ("order",)
    ordered = ordered and not given(node, "accumulate")
    if not ordered or maker is None or not _is_count(maker, place.shape(values)):
        return None
    return Outcome((_made("back", name),), places=node.refs.index(values))


def _is_count(maker: Node, shape: tuple[int, ...]) -> bool:
    """Whether a node makes 0, 1, 2, ... of this shape."""
    return maker.op == COUNTS and maker.args[:1] == (shape[0],) and len(shape) == 1
