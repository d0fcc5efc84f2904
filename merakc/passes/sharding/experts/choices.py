"""Whether masks of which each is one expert's choose nothing twice.

That follows from how they are computed: `chosen == k` for each expert k, or the k-th part of
`F.one_hot(chosen)`, whatever views, casts and products with other masks stand behind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from merakc.frontend.calls.places import size_of_places
from merakc.frontend.values.views import dim_before, keeps_elements
from merakc.ir.graph import Graph, Node, Ref
from merakc.kernels.draws import KEY_POSITION
from merakc.kernels.opaque import OPAQUE
from merakc.passes.sharding.dims import given

EQUAL, SELECT, CAST, COUNTS = (
    "aten.eq.Scalar", "aten.select.int", "aten.to.dtype", "aten.arange.default"
)  # fmt: skip
ALIKE, TOPK, UNBIND = "aten.eq.Tensor", "aten.topk.default", "aten.unbind.int"
# Calls that are true at most where each argument is.
BOTH = frozenset(
    f"aten.{name}"
    for name in ("mul.Tensor", "logical_and.default", "bitwise_and.Tensor", "__and__.Tensor")
)
ANY = ("aten.any.dim", "aten.any.dims")
TRUTHS = ("aten.ne.Scalar", "aten.gt.Scalar")


@dataclass(frozen=True, slots=True)
class Chosen:
    """The numbers that masks say, if they are true wherever a number is their expert's."""

    numbers: Ref | None = None
    experts: tuple[int, ...] = ()


class Choices:
    """What is known of the masks of a graph."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.specs = graph, graph.specs()
        self.makers = {n.name: n for n in graph.nodes}
        self.first = graph.told(_first_alike)

    def same(self, ref: Ref) -> Ref:
        """The first value that is computed as this one is."""
        return Ref(self.first.get(ref.node, ref.node), ref.index)

    def of(self, masks: Sequence[Ref]) -> Chosen | None:
        """What masks choose of which no two share an element; None where that is not known."""
        makers = [self.makers.get(m.node) for m in masks]
        nodes = [n for n in makers if n is not None]
        if len(nodes) < len(masks) or len({n.op for n in nodes}) > 1:
            return None
        op, rest = nodes[0].op, {repr((n.args[1:], n.kwargs)) for n in nodes}
        sources = {self.same(n.refs[0]) for n in nodes}
        if op == EQUAL and len(sources) == 1:
            return self._numbers(nodes, sources.pop(), [n.args[1] for n in nodes])
        if op == SELECT and len(sources) == 1:
            return self._selected(nodes, [given(n, "index") for n in nodes])
        if op == UNBIND and len(sources) == 1:
            return self._selected(nodes, [m.index for m in masks])
        if (op == CAST or keeps_elements(nodes[0])) and len(rest) == 1:
            return self.of([n.refs[0] for n in nodes])
        if op in TRUTHS and [n.args[1] for n in nodes] == [0] * len(nodes):
            return self.of([n.refs[0] for n in nodes])
        if op in BOTH:
            for k in (0, 1):
                own = [n.args[k] for n in nodes if self._is_like(n, n.args[k])]
                if len(own) == len(nodes) and self.of(own) is not None:
                    return Chosen()
        return None

    def before_any(self, masks: Sequence[Ref]) -> tuple[list[Ref], list[int]] | None:
        """The masks of which these are true where any is along some dims, and the other dims, which
        these have; None of others.
        """
        found: list[Ref] = []
        rest: set[tuple[int, ...]] = set()
        for mask in masks:
            node = self.makers.get(mask.node)
            if node is None or node.op not in ANY:
                return None
            dims = len(self.specs[node.refs[0]].shape)
            gone = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
            kept = tuple(d for d in range(dims) if d not in {g % dims for g in gone})
            if len(kept) != len(node.spec.shape):
                return None
            found.append(node.refs[0])
            rest.add(kept)
        return (found, list(rest.pop())) if len(rest) == 1 else None

    def covers(self, chosen: Chosen) -> bool:
        """Whether each element is one expert's: numbers are places in a dim of as many."""
        inputs = {i.name: i for i in self.graph.inputs}
        size = chosen.numbers and size_of_places(chosen.numbers, self.makers, inputs)
        return size is not None and {*range(size)} <= {*chosen.experts}

    def distinct(self, masks: Sequence[Ref], dim: int) -> bool:
        """Whether each is true once at most, for each place along one of two dims: of `topk`."""
        for mask in masks:
            node = self.makers.get(mask.node)
            if node is None or node.op != EQUAL or len(node.spec.shape) != 2:
                return False
            maker = self.makers.get(node.refs[0].node)
            if maker is None or maker.op != TOPK or node.refs[0].index != 1:
                return False
            if given(maker, "dim") % 2 == dim:
                return False
        return True

    def _is_like(self, node: Node, ref: Any) -> bool:
        """Whether a product with a value is nothing wherever the value is; floats may be inf."""
        whole = isinstance(ref, Ref) and not node.spec.dtype.is_floating_point
        return whole and self.specs[ref].shape == node.spec.shape

    def _numbers(self, nodes: Sequence[Node], of: Ref, experts: Sequence[Any]) -> Chosen | None:
        whole = all(type(k) is int for k in experts) and len({*experts}) == len(experts)
        if not whole or self.specs[of].dtype.is_floating_point:
            return None
        return Chosen(of, tuple(experts))

    def _selected(self, nodes: Sequence[Node], places: Sequence[int]) -> Chosen | None:
        """Parts of one value that has at most one element that is not zero along a dim."""
        source = nodes[0].refs[0]
        dims = len(self.specs[source].shape)
        dim = given(nodes[0], "dim") % dims
        places = [place % self.specs[source].shape[dim] for place in places]
        if any(given(n, "dim") % dims != dim for n in nodes) or len({*places}) < len(places):
            return None
        found = self._one_hot(source, dim)
        return found and Chosen(found.numbers, tuple(places))

    def _one_hot(self, ref: Ref, dim: int) -> Chosen | None:
        """Whether at most one element along a dim is not zero, and of which numbers."""
        node = self.makers.get(ref.node)
        if node is None:
            return None
        if node.op == ALIKE:
            return self._compared(node, dim)
        if node.op == CAST or (node.op in TRUTHS and node.args[1] == 0):
            return self._one_hot(node.refs[0], dim)
        if keeps_elements(node):
            before = dim_before(node, self.specs[node.refs[0]].shape, dim)
            return None if before is None else self._one_hot(node.refs[0], before)
        if node.op in BOTH:
            own = [r for r in node.args[:2] if self._is_like(node, r)]
            return Chosen() if any(self._one_hot(r, dim) is not None for r in own) else None
        return None

    def _compared(self, node: Node, dim: int) -> Chosen | None:
        """`numbers[..., None] == arange(count)`."""
        if dim != len(node.spec.shape) - 1:
            return None
        for one, other in (node.args[:2], node.args[1::-1]):
            maker, shape = self.makers.get(other.node), self.specs[one].shape
            counted = maker is not None and maker.op == COUNTS and len(maker.args) == 1
            if counted and shape[-1:] == (1,) and not self.specs[one].dtype.is_floating_point:
                return Chosen(one)
        return None


def _first_alike(graph: Graph) -> Mapping[str, str]:
    """For each node the first that computes the same, where the same calls give the same."""
    first: dict[str, str] = {}
    known: dict[str, str] = {}
    for node in graph.nodes:
        name = node.name
        if node.op != OPAQUE and node.op not in KEY_POSITION and node.op not in graph.functions:
            args = _named((node.args, node.kwargs), first)
            name = known.setdefault(f"{node.op} {node.grad} {args}", node.name)
        first[node.name] = name
    return first


def _named(value: Any, first: Mapping[str, str]) -> str:
    if isinstance(value, Ref):
        return str(Ref(first.get(value.node, value.node), value.index))
    if isinstance(value, tuple):
        return "(" + ", ".join(_named(v, first) for v in value) + ")"
    return repr(value)
