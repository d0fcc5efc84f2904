"""Whether a turn that a loop would pass over leaves everything as it is.

A turn belongs to a place of a mask `hit`. Where that is false, the masks by which the turn selects
rows must be false everywhere, and only there: then there are no rows, what is added or written to
rows leaves a tensor as it was, and nothing else of the turn may be read behind it. That is followed
call by call; what is not known is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from merakc.frontend.values.reads import Sources, read_refs
from merakc.frontend.values.symbols import numbers
from merakc.frontend.values.views import dim_before, keeps_elements
from merakc.ir.graph import Input, InputKind, Node, Output, Ref, TensorSpec
from merakc.kernels.draws import KEY_POSITION

NONZERO, INDEX, PUT = "aten.nonzero.default", "aten.index.Tensor", "aten.index_put.default"
INDEX_ADD, SELECT, UNBIND = "aten.index_add.default", "aten.select.int", "aten.unbind.int"
CAST, SUM, EQUAL, ALIKE = (
    "aten.to.dtype", "aten.sum.dim_IntList", "aten.eq.Scalar", "aten.eq.Tensor"
)  # fmt: skip
ANY = ("aten.any.dim", "aten.any.dims")
WHOLE = frozenset({"aten.any.default", "aten.sum.default"})
TRUTHS = ("aten.ne.Scalar", "aten.gt.Scalar")
PRODUCTS = frozenset({"aten.mul.Tensor", "aten.logical_and.default", "aten.bitwise_and.Tensor",
                      "aten.__and__.Tensor"})  # fmt: skip
COMPARISONS = frozenset(
    f"aten.{name}.{kind}" for name in ("eq", "ne", "lt", "le", "gt", "ge")
    for kind in ("Scalar", "Tensor")
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Visit:
    """The turn of a `place`: the names of its nodes, in order."""

    place: int
    nodes: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Skip:
    """What of a turn is passed over where no element of `mask` is true: the `nodes`, of which
    results are the `same` as other values then.
    """

    place: int
    mask: Ref
    nodes: frozenset[str]
    same: Mapping[Ref, Ref]
    whole: frozenset[str]  # all nodes of the turn


def skips_of(
    inputs: Sequence[Input], nodes: Sequence[Node], sources: Sources, hit: Ref,
    visits: Sequence[Visit], outputs: Sequence[Output], *,
    refuse: Callable[[str, str], Exception],
) -> list[Skip]:  # fmt: skip
    """What of each turn is passed over. Raises what `refuse` makes of a line and a reason where a
    turn may leave something.
    """
    known = _Known(inputs, nodes, sources)
    readers: dict[Ref, list[str]] = {}
    for node in nodes:
        for ref in read_refs(node, sources):
            readers.setdefault(ref, []).append(node.name)
    for out in outputs:
        readers.setdefault(out.ref, []).append("")
    inside = {name for visit in visits for name in visit.nodes}
    trained = {i.name for i in inputs if i.kind is InputKind.PARAMETER and i.requires_grad}
    own = {p for p in trained if all(r in inside for r in readers.get(Ref(p), []))}
    return [_Turn(known, hit, visit, refuse).skip(readers, own) for visit in visits]


@dataclass(eq=False)
class _Known:
    """A recording."""

    inputs: Sequence[Input]
    nodes: Sequence[Node]
    sources: Sources
    made: dict[str, Node] = field(default_factory=dict)
    given: dict[str, TensorSpec] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.made |= {n.name: n for n in self.nodes}
        self.given |= {i.name: i.spec for i in self.inputs}

    def spec(self, ref: Ref) -> TensorSpec:
        """The shape and dtype of a value."""
        node = self.made.get(ref.node)
        found = node.outputs[ref.index] if node is not None else self.given[ref.node]
        assert found is not None
        return found

    def is_positive(self, ref: Ref) -> bool:
        """Whether no element is less than zero, or no number."""
        if self.spec(ref).dtype in (torch.bool, torch.uint8):
            return True
        node = self.made.get(ref.node)
        if node is None or (self.spec(ref).dtype.is_floating_point and node.op in PRODUCTS):
            return False
        if node.op in COMPARISONS:
            return True
        if node.op in (CAST, SUM) and not self._is_wider(node):
            return False
        passing = node.op in PRODUCTS or node.op in (CAST, SUM, SELECT, UNBIND, *WHOLE)
        passing = passing or keeps_elements(node)
        scales = node.args if node.op in PRODUCTS else ()
        signed = any(isinstance(x, (int, float)) and x < 0 for x in scales)
        return passing and not signed and all(map(self.is_positive, node.refs))

    def _is_wider(self, node: Node) -> bool:
        """Whether whole numbers become others that hold them all, or no whole ones."""
        one, other = self.spec(node.refs[0]).dtype, node.spec.dtype
        whole = not other.is_floating_point and other != torch.bool
        return not whole or (not one.is_floating_point and other.itemsize >= one.itemsize)

    def keeps_zeros(self, node: Node) -> bool:
        """Whether a call gives zero, or false, where its argument is that, and nowhere else."""
        if node.op in TRUTHS and node.args[1] == 0:
            return node.op == TRUTHS[0] or self.is_positive(node.refs[0])
        if node.op != CAST:
            return False
        one, other = self.spec(node.refs[0]).dtype, node.spec.dtype
        if torch.bool in (one, other):
            return True
        return not one.is_floating_point and self._is_wider(node)


class _Turn:
    """A turn, where its place was not hit."""

    def __init__(
        self, known: _Known, hit: Ref, visit: Visit, refuse: Callable[[str, str], Exception]
    ) -> None:
        self.known, self.visit, self.refuse = known, visit, refuse
        # Values of which all at the place along a dim is zero, and numbers that are never it: both
        # just where it was not hit.
        self.gone: dict[Ref, int] = {}
        self.absent: set[Ref] = set()
        self._learn(hit, 0)

    def _learn(self, ref: Ref, dim: int) -> None:
        """That nothing is at the place along a dim of a value."""
        self.gone[ref] = dim
        node = self.known.made.get(ref.node)
        if node is None or not node.refs:
            return
        source = node.refs[0]
        shape = self.known.spec(source).shape
        if self.known.keeps_zeros(node):
            self._learn(source, dim)
        elif node.op in ANY or (node.op == SUM and self.known.is_positive(source)):
            gone = _reduced(node, len(shape))
            rest = [d for d in range(len(shape)) if d not in gone]
            kept = len(node.spec.shape) == len(shape)
            if not (kept and dim in gone):
                self._learn(source, dim if kept else rest[dim])
        elif node.op == ALIKE:
            self._compared(node, dim)
        elif (before := dim_before(node, shape, dim)) is not None:
            self._learn(source, before)

    def _compared(self, node: Node, dim: int) -> None:
        """`numbers[..., None] == arange(count)`."""
        for one, other in (node.args[:2], node.args[1::-1]):
            maker = self.known.made.get(other.node)
            counted = maker is not None and maker.op == "aten.arange.default"
            spec = self.known.spec(one)
            if not counted or spec.dtype.is_floating_point or spec.shape[-1:] != (1,):
                continue
            if dim == len(node.spec.shape) - 1 and len(spec.shape) == dim + 1:
                self._never(one)

    def _never(self, ref: Ref) -> None:
        """That numbers are never the place."""
        self.absent.add(ref)
        node = self.known.made.get(ref.node)
        if node is not None and keeps_elements(node):
            self._never(node.refs[0])

    def is_zero(self, ref: Ref) -> bool:
        """Whether all elements of a value are zero just where the place was not hit."""
        node = self.known.made.get(ref.node)
        if node is None or not node.refs:
            return False
        source, place = node.refs[0], self.visit.place
        shape = self.known.spec(source).shape
        if node.op in (SELECT, UNBIND):
            dim = node.args[1] if len(node.args) > 1 else 0
            at = node.args[2] if node.op == SELECT else ref.index
            dim %= len(shape)
            return bool(self.gone.get(source) == dim and at % shape[dim] == place)
        if node.op == EQUAL:
            return node.args[1] == place and source in self.absent
        reduced = node.op in ANY or node.op == "aten.any.default"
        if node.op in (SUM, "aten.sum.default"):
            reduced = self.known.is_positive(source)
        kept = reduced or keeps_elements(node) or self.known.keeps_zeros(node)
        return kept and self.is_zero(source)

    def skip(self, readers: Mapping[Ref, Sequence[str]], own: Iterable[str]) -> Skip:
        """What is passed over. Raises where something else may be read of the turn."""
        masks: list[Ref] = []
        symbols: set[str] = set()
        behind: set[Ref] = set()
        nodes: set[str] = set()
        same: dict[Ref, Ref] = {}
        own, names = {*own}, {*self.visit.nodes}
        for node in (self.known.made[name] for name in self.visit.nodes):
            if node.op in KEY_POSITION:
                raise self.refuse(node.source, "random numbers are drawn")
            chosen = self._masks(node)
            if not chosen and behind.isdisjoint(read_refs(node, self.known.sources)):
                if any(ref.node in own for ref in node.refs):
                    raise self.refuse(node.source, "a parameter is read aside from rows")
                continue
            masks += chosen
            nodes.add(node.name)
            behind.update(node.outs)
            if chosen:
                symbols.update(s for n in numbers(self._shapes(node)) for s in n.symbols)
            target = self._target(node, symbols, chosen)
            if target is not None:
                same[Ref(node.name)] = target
        for name in self.visit.nodes:
            for ref in self.known.made[name].outs:
                left = [r for r in readers.get(ref, ()) if r not in names]
                if left and ref not in same:
                    source = self.known.made[name].source
                    raise self.refuse(
                        source, "more than what is added or written to rows is read behind a turn"
                    )
        mask = masks[0] if masks else Ref("")
        return Skip(self.visit.place, mask, frozenset(nodes), same, frozenset(names))

    @staticmethod
    def _shapes(node: Node) -> tuple[Any, ...]:
        return tuple(o.shape for o in node.outputs if o is not None)

    def _masks(self, node: Node) -> list[Ref]:
        """The masks by which a call selects. Raises where one may choose what was not hit."""
        chosen: list[Ref] = [node.args[0]] if node.op == NONZERO else []
        if node.op in (INDEX, PUT):
            given = [r for r in node.args[1] if r is not None]
            chosen = [r for r in given if self.known.spec(r).dtype in (torch.bool, torch.uint8)]
        if not all(map(self.is_zero, chosen)):
            raise self.refuse(node.source, "a mask is not known to be true just of what was hit")
        return chosen

    def _target(self, node: Node, symbols: set[str], chosen: Sequence[Ref]) -> Ref | None:
        """What a call leaves as it is, since no rows are written."""
        if node.op == INDEX_ADD:
            given = [*node.args, *dict(node.kwargs).values()]
            places = given[2]
            return node.args[0] if self._is_empty(places, symbols) else None
        if node.op == PUT:
            empty = chosen or any(self._is_empty(r, symbols) for r in node.args[1])
            found: Ref = node.args[0]
            return found if empty else None
        return None

    def _is_empty(self, ref: Any, symbols: set[str]) -> bool:
        if not isinstance(ref, Ref):
            return False
        return any(
            {*n.symbols} <= symbols and n.value(dict.fromkeys(n.symbols, 0)) == 0
            for n in numbers(self.known.spec(ref).shape)
        )


def _reduced(node: Node, dims: int) -> list[int]:
    """The dims over which a call is taken."""
    given = node.args[1]
    return [d % dims for d in (given if isinstance(given, tuple) else (given,))]
