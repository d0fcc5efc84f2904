"""How the algebra of batches is broken: by wrong claims of calls, and steps that are left out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from merakc.ir.batches import Rows, ShareKind
from merakc.ir.graph import Node, Ref
from merakc.kernels.draws import KEY_POSITION
from merakc.passes.batches import normalise, own_rules, part, reader, split
from merakc.passes.batches.own_rules import Place
from merakc.passes.batches.states import SAMPLES, Dims, Kind, Outcome, State, by_size, plain, sums

Change = Callable[[Place, Outcome], Outcome | None]
"""What a wrong rule says of a call, given what the right one says; None where it says the same."""


@dataclass(eq=False)
class Log:
    """What wrong rules have claimed: the nodes, with the states that they gave to the outputs."""

    claims: dict[str, Outcome] = field(default_factory=dict)


@dataclass(frozen=True)
class Sabotage:
    """A wrong rule: of what kind of operation, what it claims, and how it is put in place; with
    `claims`, by what it says of calls, and in no other way: of those of `ops`, or of all if empty.
    """

    of: str
    claim: str
    put: Callable[[Log], contextlib.AbstractContextManager[Any]]
    claims: bool = False
    ops: frozenset[str] = frozenset()


# ---------------------------------------------------------------------- what wrong rules claim


def _shaped(place: Place) -> list[Dims | None]:
    """The dims of a node's outputs, as the shapes of both recordings say."""
    pairs = zip(place.node.outputs, place.twin.outputs, strict=True)
    return [by_size(a, b, place.samples, place.total) if a and b else () for a, b in pairs]


def rows(place: Place, right: Outcome) -> Outcome | None:
    """Each sample's own, where the shapes allow it."""
    found = _shaped(place)
    if any(d is None or sum(SAMPLES in f for f in d) > 1 for d in found):
        return None
    if not any(SAMPLES in f for d in found for f in d or ()):
        return None
    states = (
        State(Kind.ROWS, d) if o else None for d, o in zip(found, place.node.outputs, strict=True)
    )
    return Outcome(tuple(states))


def in_dim_0(place: Place, right: Outcome) -> Outcome | None:
    """Each sample's own, in dim 0, whatever the shapes are."""
    made = [o.shape for o in place.node.outputs if o is not None]
    if not all(made):
        return None
    return Outcome(
        tuple(
            State(Kind.ROWS, ((SAMPLES,), *plain(o.shape[1:]))) if o is not None else None
            for o in place.node.outputs
        )
    )


def a_sum(place: Place, right: Outcome, *, scaled: bool = False) -> Outcome | None:
    """A sum over the samples, where the shapes allow it."""
    return sums(place.node, scaled=scaled) if place.node.outputs == place.twin.outputs else None


def constant(place: Place, right: Outcome) -> Outcome | None:
    """The same in every part."""
    states = (State(Kind.CONSTANT, plain(o.shape)) if o else None for o in place.node.outputs)
    return Outcome(tuple(states))


def a_mean(place: Place, right: Outcome) -> Outcome | None:
    """A mean over the samples, where the shapes allow it."""
    return a_sum(place, right, scaled=True)


def unscaled(place: Place, right: Outcome) -> Outcome | None:
    """A mean without the share of its part."""
    return right._replace(scaled=False) if right.scaled else None


def scaled(place: Place, right: Outcome) -> Outcome | None:
    """A sum scaled as a mean is."""
    return right._replace(scaled=True) if not right.scaled else None


def each_time(place: Place, right: Outcome) -> Outcome | None:
    """Constants count in every part."""
    return right._replace(once=False) if right.once else None


def without_places(place: Place, right: Outcome) -> Outcome | None:
    """Places of samples are not counted by the part."""
    return right._replace(places=None) if right.places is not None else None


def outermost(place: Place, right: Outcome) -> Outcome | None:
    """Samples stand outside of all else in their dim."""
    return _moved(right, lambda d: (SAMPLES, *(f for f in d if f != SAMPLES)))


def innermost(place: Place, right: Outcome) -> Outcome | None:
    """Samples stand inside of all else in their dim."""
    return _moved(right, lambda d: (*(f for f in d if f != SAMPLES), SAMPLES))


def _moved(right: Outcome, move: Callable[[tuple[Any, ...]], tuple[Any, ...]]) -> Outcome | None:
    states = tuple(
        s and s._replace(dims=s.dims and tuple(move(d) if SAMPLES in d else d for d in s.dims))
        for s in right.states
    )
    return right._replace(states=states) if states != right.states else None


# ---------------------------------------------------------------------- of which calls


def _names(ops: str) -> frozenset[str]:
    return frozenset(ops.split())


def calls(of: str, ops: str, kind: Kind, change: Change, meeting: Kind | None = None) -> Sabotage:
    """A wrong rule for calls of these ops (all, if empty) of which the right one says `kind`.

    With `meeting`, an argument is of that kind; without, none is coupled.
    """
    names = _names(ops)

    def reads(place: Place) -> bool:
        kinds = {s.kind for s in place.states.values()}
        return meeting in kinds if meeting else Kind.COUPLED not in kinds

    def wrong(place: Place, right: Outcome) -> Outcome | None:
        op = place.node.op.split(".")[1]
        own = [s.kind for s in right.states if s is not None]
        fits = (op in names or not names) and own[:1] == [kind] and reads(place)
        return change(place, right) if fits else None

    claim = (change.__doc__ or "").strip().rstrip(".").lower()
    return Sabotage(of, claim, partial(_claiming, wrong), True, names)


@contextlib.contextmanager
def _claiming(wrong: Change, log: Log) -> Iterator[None]:
    right = reader.Reader._outcome

    def outcome(self: reader.Reader, place: Place) -> Outcome:
        found = right(self, place)
        claimed = wrong(place, found)
        if claimed is None or claimed == found:
            return found
        log.claims[place.node.name] = claimed
        return claimed

    with patch.object(reader.Reader, "_outcome", outcome):
        yield


def without(of: str, claim: str, place: Any, name: str, wrong: Any, *more: Any) -> Sabotage:
    """A step that is replaced: `name` of a module or class, and of `more`, by `wrong`."""

    @contextlib.contextmanager
    def put(log: Log) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for each in (place, *more):
                stack.enter_context(patch.object(each, name, wrong))
            yield

    return Sabotage(of, claim, put)


def without_rule(of: str, *ops: str) -> Sabotage:
    """A rule of its own that is left out: the sharding row speaks of it alone."""
    kept = {op: rule for op, rule in own_rules._RULES.items() if op.split(".")[1] not in ops}
    return without(of, "its sharding row says all", own_rules, "_RULES", kept)


# ---------------------------------------------------------------------- steps that are left out


def as_it_is(self: reader.Reader, state: State, *_: Any, **__: Any) -> State:
    """What was claimed, whatever the shapes are."""
    return state


def own(self: reader.Reader, node: Node, twin: Node) -> Outcome:
    """What is known, computed by each part of its own samples."""
    if not node.refs:
        return self.made(node, twin)
    outcome = self.outcome(node, twin, lifted=False)
    shown = [
        s and reader.seen_by_shape(a, b, self.samples, self.total, "")
        for s, a, b in zip(outcome.states, node.outputs, twin.outputs, strict=True)
        if a is not None and b is not None
    ]
    return outcome if len(shown) != len(outcome.states) else outcome._replace(states=tuple(shown))


_made = reader.Reader.made


def made_by_parts(self: reader.Reader, node: Node, twin: Node) -> Outcome:
    """Tensors made of nothing, made by each part."""
    found = _made(self, node, twin)
    return found._replace(states=tuple(s and s._replace(whole=False) for s in found.states))


def counting_all(graph: Any, node: Node, *_: Any) -> Any:
    """Every label counts, ignored or not."""
    return graph.specs[node.args[1]].numel


def mean_as_it_is(self: Any, node: Node) -> None:
    """A mean over labels as it was recorded."""
    self.nodes.append(node)


_once = part.PartWriter._once


def numbers_each_time(self: part.PartWriter, node: Node) -> Node:
    """Tensors count once, numbers in every part."""
    found = _once(self, node)
    own = [
        a if isinstance(a, (int, float)) else b for a, b in zip(node.args, found.args, strict=True)
    ]
    return replace(found, args=tuple(own))


class _Backwards(Rows):
    """Rows of which parts see those of others: the last first."""

    def take(self, value: torch.Tensor, first: int, count: int) -> torch.Tensor:
        """The part of `count` samples that stands as far from the end as this from the start."""
        return super().take(value, self.samples(value.shape) - first - count, count)


_known = split._Split.known


def of_others(self: Any, wanted: Any) -> Any:
    """Values of the batch alone, of which each part sees the samples of others."""
    found = _known(self, wanted)
    order = (
        {n: r and _Backwards(r.dim, r.outer, r.inner) for n, r in found.rows.items()}
        if found
        else {}
    )
    return found and replace(found, rows=order)


_keyed = part.keyed


def drawn_alike(found: Any, node: Node, samples: int, *, together: bool = False) -> Node:
    """Every sample draws the same numbers as the first one of its part."""
    made = _keyed(found, node, samples, together=together)
    if node.op not in KEY_POSITION:
        return made
    at = KEY_POSITION[node.op] + 1
    return replace(made, args=(*made.args[:at], -1, *made.args[at + 1 :]))


def filled_with_others(self: Any, node: Node) -> None:
    """Zeros for ones, and ones for zeros."""
    _filled(self, node)
    last = self.nodes[-1]
    if last.op == normalise.FULL and last.args[1] in (0, 1):
        self.nodes[-1] = replace(last, args=(last.args[0], type(last.args[1])(1 - last.args[1])))


_filled = normalise._Writer.filled
_share_of = split.share_of


def joined_as(kind: ShareKind, now: ShareKind) -> Callable[[Any, Ref], Any]:
    """Values of one kind handed to the head as if they were of another."""

    def share(found: Any, ref: Ref) -> Any:
        own = _share_of(found, ref)
        return replace(own, kind=now) if own.kind is kind else own

    return share


def rows_backwards(found: Any, ref: Ref) -> Any:
    """Rows whose samples are taken to stand inside of all else in their dim."""
    own = _share_of(found, ref)
    turned = own.rows and Rows(own.rows.dim, own.rows.outer * own.rows.inner, 1)
    return replace(own, rows=turned)
