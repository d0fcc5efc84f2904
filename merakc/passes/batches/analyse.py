"""The algebra of batches: what parts of a batch make of every value of a recorded forward.

An abstract interpretation over two recordings of one forward, of a part and of the whole batch.
Each node is looked at alone, with the states of its arguments. Only the claims that a value is
constant, rows or a sum can be wrong; that it is coupled is always safe, since what is coupled is
computed from the whole batch. Every claim is checked against the shapes of both recordings: dims of
samples grow as the samples do, and no others.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

from merakc.errors import RecordError
from merakc.ir.batches import Rows
from merakc.ir.graph import Graph, InputKind, Node, Ref
from merakc.passes.batches.aligned import KNOWN, common, is_own
from merakc.passes.batches.alike import OtherPathError, check_alike, in_common
from merakc.passes.batches.normalise import (
    means_over_samples,
    normalised,
    sum_name,
    summed,
    without_copies,
)
from merakc.passes.batches.places import place_states, with_places
from merakc.passes.batches.reader import MADE_DRAWS, Reader, same_constant, seen_by_shape
from merakc.passes.batches.states import (
    Kind,
    Outcome,
    State,
    size,
)
from merakc.passes.sharding.key_draws import key_draws


@dataclass(frozen=True)
class Analysis:
    """Two recordings of a forward, written alike, and what was found of their values.

    `part` is of `samples` samples and `whole` of `total`; nodes of one name are the same call.
    `recorded` is the whole batch's as it was recorded, for whoever would rather not rely on that.
    """

    part: Graph
    whole: Graph
    samples: int
    total: int
    sampled: Mapping[str, Rows]
    states: Mapping[Ref, State]
    outcomes: Mapping[str, Outcome]
    makers: Mapping[str, Node] = field(repr=False)
    twins: Mapping[str, Node] = field(repr=False)  # nodes of the whole batch's graph
    recorded: Graph | None = field(default=None, repr=False)

    @property
    def share(self) -> float:
        """What a part holds of all samples."""
        return self.samples / self.total

    def shown(self, ref: Ref) -> State:
        """What the shapes alone say of a value: whether it has samples, and where."""
        spec, other = self.part.specs()[ref], self.whole.specs()[ref]
        return seen_by_shape(spec, other, self.samples, self.total, "")

    @property
    def assumed(self) -> tuple[str, ...]:
        """What holds by convention, with its lines."""
        found = ((self.outcomes[n.name].assumed, n.source) for n in self.part.nodes)
        return tuple(dict.fromkeys(f"{what}, at {where}" for what, where in found if what))


def analyse(
    part: Graph,
    whole: Graph,
    sampled: Mapping[str, Rows],
    samples: int,
    total: int,
    *,
    placing: bool = False,
) -> Analysis:
    """The analysis of a forward recorded for `samples` and for `total` samples.

    With `placing`, places that the batch says are taken to be in their own samples, which every
    step checks; without, they couple.

    `sampled` says where the samples of the batch's tensors stand; all others are whole in every
    part. Raises `RecordError` where a batch of another size takes another path.
    """
    assert 1 < samples < total, (samples, total)
    recorded = whole
    part, whole = _written_alike(part, whole, samples, total)
    part = _guessed(part, sampled)
    reader = Reader(part, whole, sampled, samples, total, placing=placing)
    twins = {n.name: n for n in whole.nodes}
    for item, twin in zip(part.inputs, common(whole).inputs, strict=True):
        reader.enter(item, twin)
    for node in part.nodes:
        reader.read(node, twins[node.name])
    picked = {n: o.picked for n, o in reader.outcomes.items() if o.picked}
    states = {**reader.states, **_of_whole(whole), **place_states(part, picked)}
    outcomes = dict(reader.outcomes)
    part, whole = with_places(part, picked, whole=False), with_places(whole, picked, whole=True)
    for node in part.nodes:
        if node.name not in outcomes:
            outcomes[node.name] = Outcome(tuple(states[r] for r in node.made))
    return Analysis(
        part, whole, samples, total=total, sampled=sampled, states=states, outcomes=outcomes,
        makers={n.name: n for n in part.nodes}, twins={n.name: n for n in whole.nodes},
        recorded=None if any(n.op == KNOWN for n in part.nodes) else recorded,
    )  # fmt: skip


def _of_whole(whole: Graph) -> dict[Ref, State]:
    """The states of what only the recording of the whole batch has."""
    state = State(Kind.CONSTANT, known=True, whole=True)
    return {ref: state for ref in whole.specs() if is_own(ref.node)}


def _written_alike(part: Graph, whole: Graph, samples: int, total: int) -> tuple[Graph, Graph]:
    """Both normalised, with copies that have a value in one piece where both have the same ones;
    with what the batch alone says in a common form, where that alone is made otherwise.
    """
    for copies in (True, False):
        one, other = normalised(part, copies=copies), normalised(whole, copies=copies)
        with suppress(OtherPathError):
            check_alike(one, other, samples, total)
            break
    else:
        one, other = in_common(one, other)
        check_alike(one, other, samples, total)
    names = means_over_samples(one, other)
    return summed(one, names), summed(other, names)


def _guessed(part: Graph, sampled: Mapping[str, Rows]) -> Graph:
    """The graph with a guess of where the samples stand in what is drawn from nothing."""
    drawn = any(n.op in MADE_DRAWS for n in part.nodes)
    return key_draws(part, {n for n, rows in sampled.items() if rows == Rows()}) if drawn else part


def _as_found(
    found: Analysis, part: Graph, whole: Graph, samples: int, total: int
) -> tuple[Graph, Graph]:
    """Two recordings of other numbers of samples, written as the part was that was looked at."""
    picked = {n: o.picked for n, o in found.outcomes.items() if o.picked}
    for copies in (True, False):
        own = found.part if copies else without_copies(found.part)
        names = {n.name for n in own.nodes if sum_name(n) in found.makers}
        one, other = normalised(part, copies=copies), normalised(whole, copies=copies)
        is_common = any(n.op == KNOWN for n in own.nodes) or len(own.outputs) < len(one.outputs)
        if is_common:
            one, other = in_common(one, other)
        one, other = summed(one, names), summed(other, names)
        if is_common:
            one = with_places(one, picked, whole=False)
            other = with_places(other, picked, whole=True)
        with suppress(*(OtherPathError,) * copies):
            check_alike(one, own, samples, found.samples)
            check_alike(other, own, total, found.samples)
            break
    return one, other


def retaken(found: Analysis, part: Graph, whole: Graph, samples: int, total: int) -> Analysis:
    """The same findings, for recordings of other numbers of samples.

    Raises `RecordError` where these do something else, or dims of samples are not of their size.
    """
    recorded = whole
    part, whole = _as_found(found, part, whole, samples, total)
    for name in (i.name for i in part.inputs if i.kind is InputKind.CONSTANT):
        if not found.states[Ref(name)].whole and not same_constant(found.part, part, name):
            raise RecordError(
                f"a tensor made in the forward has other values for {samples} samples than for "
                f"{found.samples}; train with dp=1 and micro_batches=1"
            )
    for graph, now in ((part, samples), (whole, total)):
        specs = graph.specs()
        for ref, state in found.states.items():
            dims = state.dims
            if (
                ref not in specs
                or dims is None
                or tuple(size(d, now) for d in dims) == specs[ref].shape
            ):
                continue
            node, shape = found.makers.get(ref.node), list(specs[ref].shape)
            raise RecordError(
                f"{node.source if node else ref.node}: a value is of shape {shape} for {now} "
                f"samples, which does not follow from those for {found.samples}; train with "
                "dp=1 and micro_batches=1, or with more samples in each micro-batch"
            )
    return replace(
        found, part=part, whole=whole, samples=samples, total=total,
        recorded=recorded if found.recorded is not None else None,
        makers={n.name: n for n in part.nodes}, twins={n.name: n for n in whole.nodes},
    )  # fmt: skip
