"""What Python passes over where a mask chooses no rows: `if rows.numel() == 0: continue`.

Such a question is answered as if rows were there. What then computes with them, wherever it stands,
is passed over where there are none: that leaves what they are added or written to as it was, and
nothing else of it may be read. Masks are told apart by the value that they are all zero with.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

import sympy  # type: ignore[import-untyped]
import torch

from merakc.frontend.values.idle import (
    ALIKE,
    CAST,
    EQUAL,
    INDEX,
    NONZERO,
    PUT,
    SELECT,
    UNBIND,
    Known,
    Skip,
    Turn,
    Visit,
)  # fmt: skip
from merakc.frontend.values.reads import read_refs
from merakc.frontend.values.symbols import ITEM, Answer, Number
from merakc.frontend.values.views import dim_before, keeps_elements
from merakc.ir.graph import InputKind, Node, Ref

LARGEST = 2**40  # more rows than there are
# Which result of a call is the places of largest values in a dim.
CHOICES = {"aten.topk.default": 1, "aten.max.dim": 1, "aten.argmax.default": 0}
Refuse = Callable[[str, str], Exception]


@dataclass(frozen=True, slots=True)
class Question:
    """Whether something is true of a mask: where all of the `root` is zero, and where not."""

    root: Ref
    empty: Answer
    hit: Answer


def root_of(known: Known, ref: Ref) -> Ref:
    """The first value that is zero in all places just where this one is."""
    node = known.made.get(ref.node)
    while node is not None and node.refs and known.is_zero_with_all(node):
        ref = node.refs[0]
        node = known.made.get(ref.node)
    return ref


def question_of(number: Number, known: Known, source: tuple[Ref, int | None]) -> Question | None:
    """What a truth about one number asks of a mask; None where it may be of more than whether the
    number is zero, or that says nothing of a mask. `source` is where the number is from.
    """
    answers = _of_zero(number)
    ref, dim = source
    node = known.made.get(ref.node)
    if node is not None and node.op == ITEM:
        ref = node.refs[0]
        node = known.made.get(ref.node)
    if answers is None or node is None:
        return None
    if dim is not None:
        masks = _masks(known, node) if dim == 0 else []
        return Question(root_of(known, masks[0]), *answers) if len(masks) == 1 else None
    if node.op == EQUAL and node.args[1] == 0 and known.is_positive(node.refs[0]):
        ref, answers = node.refs[0], (answers[1], answers[0])
    root = root_of(known, ref)
    return Question(root, *answers) if root != ref else None


def _of_zero(number: Number) -> tuple[Answer, Answer] | None:
    """What a truth is where its one number is zero, and where it is above, if that is one thing."""
    found, symbols = number.expression, number.symbols
    if not isinstance(found, sympy.core.relational.Relational) or len(symbols) != 1:
        return None
    difference = sympy.expand(found.lhs - found.rhs)
    (symbol,) = found.free_symbols
    steep, at_zero = difference.diff(symbol), difference.subs(symbol, 0)
    if not (steep.is_number and at_zero.is_number):
        return None
    if isinstance(found, (sympy.Eq, sympy.Ne)) and at_zero != 0:
        return None
    zero, one, most = (number.value({symbols[0]: n}) for n in (0, 1, LARGEST))
    return (zero, one) if one == most != zero else None


def _masks(known: Known, node: Node) -> list[Ref]:
    """The masks by which a call chooses."""
    if node.op == NONZERO:
        return [node.args[0]]
    given = [r for r in node.args[1] if r is not None] if node.op in (INDEX, PUT) else []
    return [r for r in given if known.spec(r).dtype in (torch.bool, torch.uint8)]


class _Passed(Turn):
    """What computes with the rows of a mask, where it chooses none."""

    def __init__(
        self, known: Known, key: Ref, place: int, refuse: Refuse, form: Callable[[Ref], Ref]
    ) -> None:
        self.key, self.form = key, form
        super().__init__(known, key, Visit(place, ()), refuse)

    def _learn(self, ref: Ref, dim: int) -> None:
        """Nothing of other values."""

    def is_zero(self, ref: Ref) -> bool:
        """Whether all elements of a value are zero just where there are no rows."""
        return self.form(root_of(self.known, ref)) == self.key

    def reach(
        self, first: Iterable[int], order: Mapping[str, int], readers: Mapping[Ref, Sequence[str]]
    ) -> None:
        """Finds what computes with what the `first` nodes choose, up to what it is written to."""
        waiting = list(first)
        heapify(waiting)
        seen, names, symbols = {*waiting}, list[str](), set[str]()
        while waiting:
            node = self.known.nodes[heappop(waiting)]
            names.append(node.name)
            chosen = self.masks_of(node)
            symbols |= self.sizes_of(node) if chosen else set()
            if self.target_of(node, symbols, chosen) is not None:
                continue
            for name in (name for ref in node.outs for name in readers.get(ref, ()) if name):
                if order[name] not in seen:
                    seen.add(order[name])
                    heappush(waiting, order[name])
        self.visit = Visit(self.visit.place, tuple(names))


def skips_where_empty(
    known: Known, asked: Sequence[tuple[Ref, int, Refuse]], form: Callable[[Ref], Ref],
    readers: Mapping[Ref, Sequence[str]],
) -> list[Skip]:  # fmt: skip
    """What is passed over where each of the masks that were `asked` about chooses no rows: the form
    of its root, its place, and what makes an error of a line and a reason.

    Raises that where something else of it may be read, or a parameter that has no gradient then.
    """
    order = {node.name: k for k, node in enumerate(known.nodes)}
    choosing: dict[Ref, list[int]] = defaultdict(list)
    for k, node in enumerate(known.nodes):
        for mask in _masks(known, node):
            choosing[form(root_of(known, mask))].append(k)
    found: list[Skip] = []
    for key, place, refuse in asked:
        passed = _Passed(known, key, place, refuse, form)
        passed.reach(dict.fromkeys(choosing[key]), order, readers)
        found.append(passed.skip(readers, ()))
        _check_parameters(known, found[-1:], readers, refuse)
    if found:
        certain = {*_one_of_each(known, [key for key, _, _ in asked], form)}
        rest = [skip for skip, (key, _, _) in zip(found, asked, strict=True) if key not in certain]
        _check_parameters(known, rest, readers, asked[0][2])
    return found


def _check_parameters(
    known: Known, skips: Sequence[Skip], readers: Mapping[Ref, Sequence[str]], refuse: Refuse
) -> None:
    """Raises where what is passed over alone depends on a parameter that is read aside from rows:
    in one process it has no gradient then.
    """
    gone = {name for skip in skips for name in skip.nodes}
    kept = {ref for skip in skips for ref in skip.same.values()}
    trained = {i.name for i in known.inputs if i.kind is InputKind.PARAMETER and i.requires_grad}
    waiting = [known.made[name] for name in gone]
    while waiting:
        for ref in read_refs(waiting.pop(), known.sources):
            node = known.made.get(ref.node)
            outs = node.outs if node is not None else (ref,)
            if ref in kept or ref.node in gone or not _is_read_in(gone, outs, readers):
                continue
            if node is not None:
                gone.add(node.name)
                waiting.append(node)
            elif ref.node in trained:
                aside = [n for n in readers[ref] if not any(n in skip.nodes for skip in skips)]
                if aside:
                    raise refuse(known.made[aside[0]].source, "a parameter is read aside from rows")


def _is_read_in(
    names: Collection[str], refs: Iterable[Ref], readers: Mapping[Ref, Sequence[str]]
) -> bool:
    return all(name in names for ref in refs for name in readers.get(ref, ()))


def _one_of_each(known: Known, roots: Sequence[Ref], form: Callable[[Ref], Ref]) -> Iterator[Ref]:
    """One root of those, of several, of which one is hit whatever the data: numbers of experts that
    have been chosen are compared with every number that there is.
    """
    numbers: dict[Ref, dict[int, Ref]] = defaultdict(dict)
    sizes: dict[Ref, int] = {}
    for root in roots:
        node = known.made.get(root.node)
        if node is None or node.op not in (EQUAL, SELECT, UNBIND):
            continue
        ids = form(node.refs[0])
        if node.op == EQUAL:
            number, sizes[ids] = int(node.args[1]), _choices(known, node.refs[0])
        else:
            dim = node.args[1] if len(node.args) > 1 else 0
            size = known.spec(node.refs[0]).shape[dim]
            number = root.index if node.op == UNBIND else node.args[2] % size
            sizes[ids] = _classes(known, node.refs[0], dim)
        numbers[ids][number] = root
    for ids, of in numbers.items():
        if sizes[ids] and of.keys() >= {*range(sizes[ids])}:
            yield next(iter(of.values()))


def _classes(known: Known, ref: Ref, dim: int) -> int:
    """How many classes there are along a dim of numbers in their one-hot form, which are places of
    largest scores among as many; 0 where it is something else.
    """
    node, at = known.made.get(ref.node), dim % len(known.spec(ref).shape)
    while node is not None and node.op != ALIKE:
        before = node.refs[0] if node.refs else None
        same = at if node.op == CAST else None
        if before is not None and keeps_elements(node):
            same = dim_before(node, known.spec(before).shape, at)
        if before is None or same is None:
            return 0
        node, at = known.made.get(before.node), same
    counted = known.made.get(node.args[1].node) if node is not None else None
    if node is None or counted is None or counted.op != "aten.arange.default":
        return 0
    size = _choices(known, node.args[0])
    is_last = at == len(node.spec.shape) - 1
    return size if is_last and counted.spec.shape == (size,) else 0


def _choices(known: Known, ref: Ref) -> int:
    """Of how many scores the largest were chosen whose places a value holds, all or some; 0 where
    it holds something else.
    """
    node = known.made.get(ref.node)
    while node is not None and (keeps_elements(node) or node.op in (SELECT, UNBIND)):
        ref = node.refs[0]
        node = known.made.get(ref.node)
    if node is None or CHOICES.get(node.op) != ref.index:
        return 0
    place, usual = (2, -1) if node.op == "aten.topk.default" else (1, None)
    dim = dict(enumerate(node.args)).get(place, dict(node.kwargs).get("dim", usual))
    return 0 if dim is None else int(known.spec(node.refs[0]).shape[dim])
