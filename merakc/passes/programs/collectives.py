"""Places the collectives over dp in a Program: which bucket is gathered and reduced when.

Parameters of a bucket are gathered one bucket ahead of their first reader, in forward, backward and
recomputation alike; two buckets are gathered at a time. Gradients are reduced as soon as the last
one of a bucket is made. What the optimizers wrote is gathered from the start of the step on.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise

from merakc.analysis.buckets import BucketSpec, Held, ahead, parameters_in_order, plan_buckets
from merakc.costs.device import place_on
from merakc.costs.nodes import node_seconds
from merakc.ir.graph import Graph, Input, InputKind, OutputKind, Ref
from merakc.ir.plan import Plan
from merakc.ir.precision import kept_dtype
from merakc.ir.program import (
    Action,
    ActionKind,
    Collective,
    CollectiveKind,
    Mesh,
    Program,
    StageGraphs,
)
from merakc.machines.cluster import NOMINAL_GPU

# A rank of a group of that size, on nominal machines: only the ratio of seconds matters.
TP = 8
GRADIENTS = (ActionKind.BACKWARD, ActionKind.WEIGHT_GRAD)


@dataclass(frozen=True, slots=True)
class Touch:
    """Where a graph first reads a parameter, or has made its gradient.

    That is before, or after, `node`, with `share` of the graph's seconds before it.
    """

    parameter: str
    is_gradient: bool
    node: str
    share: float


# By the kind of a compute, and whether its micro-batch is recomputed.
Touches = Mapping[tuple[ActionKind, bool], tuple[Touch, ...]]


def stage_touches(stage: StageGraphs) -> Touches:
    """What the graphs of a stage do with parameters."""
    targets = {i.name: i.target for i in stage.forward.inputs if i.kind is InputKind.PARAMETER}
    found = {}
    for kind in ActionKind:
        for again in (False, True):
            piece = stage.piece(kind, again=again) if kind.is_compute else None
            if piece is not None:
                found[kind, again] = graph_touches(piece, targets)
    return found


def graph_touches(graph: Graph, targets: Mapping[str, str]) -> tuple[Touch, ...]:
    """What one graph does with parameters; `targets` names them by the forward's inputs."""
    unread = {Ref(i.name): i.target for i in graph.inputs if i.kind is InputKind.PARAMETER}
    made: dict[str, list[str]] = {}
    for out in sorted(graph.outputs, key=lambda o: o.ref.index):
        if out.kind is OutputKind.GRADIENT and out.name in targets:
            made.setdefault(out.ref.node, []).append(targets[out.name])
    found = [Touch(p, True, "", 0.0) for i in graph.inputs for p in made.get(i.name, ())]
    for node, (before, after) in zip(graph.nodes, pairwise(_shares(graph)), strict=True):
        for ref in node.refs:
            if ref in unread:
                found.append(Touch(unread.pop(ref), False, node.name, before))
        found += [Touch(p, True, node.name, after) for p in made.get(node.name, ())]
    returned = dict.fromkeys(o.ref for o in graph.outputs if o.ref in unread)
    return (*found, *(Touch(unread[ref], False, "", 1.0) for ref in returned))


def rough_touches(local: Graph) -> Touches:
    """Rough touches from a forward alone: the backward is taken for the forward reversed."""
    parameters = {Ref(i.name): i for i in local.inputs if i.kind is InputKind.PARAMETER}
    forward = graph_touches(local, {})
    backward: list[Touch] = []
    unread, first_reader = set(parameters), {t.parameter: t.node for t in forward}
    shares = list(pairwise(_shares(local)))
    for node, (before, after) in zip(reversed(local.nodes), reversed(shares), strict=True):
        refs = [r for r in dict.fromkeys(node.refs) if r in parameters]
        for ref in refs:
            if ref in unread:
                unread.remove(ref)
                backward.append(Touch(parameters[ref].target, False, node.name, 1.0 - after))
        for ref in refs:
            item = parameters[ref]
            if item.requires_grad and first_reader[item.target] == node.name:
                backward.append(Touch(item.target, True, node.name, 1.0 - before))
    reads = tuple(t for t in backward if not t.is_gradient)
    gradients = tuple(t for t in backward if t.is_gradient)
    found: dict[tuple[ActionKind, bool], tuple[Touch, ...]] = {}
    for again in (False, True):
        found[ActionKind.FORWARD, again] = found[ActionKind.RECOMPUTE, again] = forward
        found[ActionKind.BACKWARD, again] = tuple(backward)
        found[ActionKind.INPUT_GRAD, again] = reads
        found[ActionKind.WEIGHT_GRAD, again] = gradients
    return found


def rank_buckets(plan: Plan, local: Sequence[Graph]) -> tuple[tuple[BucketSpec, ...], ...]:
    """The buckets of each pipeline rank, from the stages' own forward graphs."""
    read: list[dict[str, Input]] = [{} for _ in range(plan.pp)]
    for graph, rank in zip(local, plan.rank_of, strict=True):
        read[rank] |= {item.target: item for item in graph.told(parameters_in_order)}
    held: list[list[Held]] = [[] for _ in range(plan.pp)]
    on_host, experts = plan.on_host, plan.of_experts
    updated, kept = set(on_host.updated), set(on_host.kept)
    for name in dict.fromkeys(i.target for g in local for i in g.told(parameters_in_order)):
        stages = plan.parameters[name]
        for rank, count in Counter(plan.rank_of[s] for s in stages).items():
            if (item := read[rank].get(name)) is not None:
                dtype = kept_dtype(item.spec.dtype, plan.precision, is_trained=item.requires_grad)
                numel, is_trained = item.spec.numel, item.requires_grad
                held[rank].append(
                    Held(
                        name, dtype, numel, stages, is_trained, count > 1,
                        on_host=name in updated, fetched=name in kept, of_experts=name in experts,
                    )
                )  # fmt: skip
    return tuple(plan_buckets(own, plan.shards, dp=plan.dp) for own in held)


def trained(graph: Graph) -> set[str]:
    """The names of the parameters that the loss gives a gradient to."""
    grads = graph.grad_values()  # a mask has none, nor what it was made of
    needed = {o.ref.node for o in graph.outputs if o.kind.begins_gradients and o.ref in grads}
    for node in reversed(graph.nodes):
        if node.name in needed and node.grad_outputs(grads):
            needed.update(r.node for r in node.refs if r in grads)
    return {
        i.target
        for i in graph.inputs
        if i.kind is InputKind.PARAMETER and i.requires_grad and i.name in needed
    }


def _shares(graph: Graph) -> list[float]:
    """The share of the graph's seconds before each node, and 1."""
    specs = graph.specs()
    place = place_on(NOMINAL_GPU, TP)
    seconds = [node_seconds(n, specs, place) for n in graph.nodes]
    total_s = sum(seconds)
    return [done_s / total_s for done_s in accumulate(seconds, initial=0.0)] if seconds else []


def with_collectives(
    program: Program,
    touches: Mapping[int, Touches],
    buckets: Sequence[BucketSpec],
    trained: Collection[str],
) -> Program:
    """The Program of a rank with the collectives of its buckets over dp.

    `touches` are those of its stages, `trained` the parameters that get a gradient. A `GATHER`
    action at its head starts what needs no compute; a bucket of shared parameters is reduced in the
    last `REDUCE`.
    """
    return _Placing(program, touches, buckets, trained).run()


def placed_collectives(
    programs: Sequence[Program],
    mesh: Mesh,
    touches: Mapping[int, Touches],
    buckets: Callable[[int], Sequence[BucketSpec]],
    trained: Collection[str],
) -> tuple[Program, ...]:
    """The same of Programs of a mesh, of which those of one pipeline rank do the same.

    `buckets` gives those of a pipeline rank.
    """
    made: dict[int, Program] = {}
    found = []
    for program in programs:
        _, rank, _ = mesh.coordinates(program.rank)
        if rank not in made:
            made[rank] = with_collectives(program, touches, buckets(rank), trained)
        found.append(like(program, made[rank]))
    return tuple(found)


def like(program: Program, placed: Program) -> Program:
    """The Program with the collectives of another replica's, which does the same."""
    head = placed.actions[: len(placed.actions) - len(program.actions)]
    pairs = zip(program.actions, placed.actions[len(head) :], strict=True)
    actions = (replace(a, collectives=b.collectives) if b.collectives else a for a, b in pairs)
    return Program(program.rank, (*head, *actions))


@dataclass(frozen=True, slots=True)
class _Use:
    """The place at which a compute begins to read a bucket, or has made its gradients. Computes of
    one kind share it, and the collectives that were `placed` there.
    """

    bucket: BucketSpec
    touch: Touch
    gradients: frozenset[str] = frozenset()
    placed: dict[tuple[CollectiveKind, str], Collective] = field(default_factory=dict)

    def at(self, kind: CollectiveKind, bucket: BucketSpec | None = None) -> Collective:
        """A collective in this place, of this bucket where no other is given."""
        key = kind, (bucket or self.bucket).name
        if key not in self.placed:
            self.placed[key] = Collective(*key, self.touch.node, self.touch.share)
        return self.placed[key]


@dataclass(frozen=True, slots=True)
class _Uses:
    """The uses of one kind of compute, each with its place among them: what reads a bucket that is
    gathered, and what makes gradients.
    """

    reads: tuple[tuple[int, _Use], ...]
    gradients: tuple[tuple[int, _Use], ...]

    @classmethod
    def of(cls, uses: Iterable[_Use]) -> _Uses:
        """Those of a compute, in their order."""
        numbered = list(enumerate(uses))
        return cls(
            tuple((i, u) for i, u in numbered if not u.gradients and u.bucket.is_waited_for),
            tuple((i, u) for i, u in numbered if u.gradients),
        )


# Collectives, by the number of their action; each with its place in it.
_Placed = dict[int, list[tuple[int, Collective]]]


class _Window:
    """The buckets that are there while those of `gathered` are read, one after the other: the one
    that is, and as many `ahead` as they may.

    Where the next is gathered, those go that were read, but for the one that is.
    """

    def __init__(self, gathered: Sequence[BucketSpec], ahead: int) -> None:
        self.gathered, self.ahead, self.place = gathered, ahead, -1
        self.unread: list[BucketSpec] = []
        self.seen: list[BucketSpec] = []  # read, and still there

    def first(self) -> Iterator[BucketSpec]:
        """What is gathered before anything is read."""
        for bucket in dict.fromkeys(self.gathered[: self.ahead]):
            self.unread.append(bucket)
            yield bucket

    def read(self) -> Iterator[BucketSpec]:
        """What is gathered as the next bucket is read."""
        self.place += 1
        now = self.gathered[self.place]
        if now in self.unread:
            self.unread.remove(now)
            self.seen.append(now)
        for then in self.gathered[self.place + 1 : self.place + 1 + self.ahead]:
            if then in self.seen and then is not now:
                return  # it is to stay
            if then in self.unread or then is now:
                continue
            self.seen = [now]
            self.unread.append(then)
            yield then


class _Placing:
    """The walk along one Program."""

    def __init__(
        self,
        program: Program,
        touches: Mapping[int, Touches],
        buckets: Sequence[BucketSpec],
        trained: Collection[str],
    ) -> None:
        self.program, self.buckets = program, buckets
        self.bucket_of = {name: b for b in buckets for name in b.members}
        actions = program.actions
        made = {
            touch.parameter
            for stage in {a.stage for a in actions}
            for found in touches[stage].values()
            for touch in found
            if touch.is_gradient and touch.parameter in trained
        }
        self.wanted = {b.name: made.intersection(b.members) for b in buckets}
        self.last = {a.stage: k for k, a in enumerate(actions) if a.kind in GRADIENTS}
        again = {(a.stage, a.micro_batch) for a in actions if a.kind is ActionKind.RECOMPUTE}
        known: dict[tuple[int, ActionKind, bool], _Uses] = {}
        self.uses: list[_Uses] = []
        for action in actions:
            key = action.stage, action.kind, (action.stage, action.micro_batch) in again
            if key not in known:
                found = touches[action.stage].get(key[1:], ()) if action.kind.is_compute else ()
                known[key] = _Uses.of(self._merged(found))
            self.uses.append(known[key])

    def _merged(self, touches: Sequence[Touch]) -> Iterator[_Use]:
        """The touches of a graph by bucket: reads where the bucket changes, gradients at the
        last.
        """
        current = None
        left: dict[str, list[str]] = {}
        for touch in touches:
            if touch.is_gradient and touch.parameter in self.bucket_of:
                left.setdefault(self.bucket_of[touch.parameter].name, []).append(touch.parameter)
        for touch in touches:
            bucket = self.bucket_of.get(touch.parameter)
            if bucket is None:
                continue
            if touch.is_gradient:
                names = left[bucket.name]
                if touch.parameter == names[-1] and not bucket.is_shared:
                    yield _Use(bucket, touch, frozenset(names))
            elif bucket is not current:
                current = bucket
                yield _Use(bucket, touch)

    def run(self) -> Program:
        """The Program with its collectives."""
        head, waits = self._gathers()
        reductions = self._reductions()
        actions = []
        for k, action in enumerate(self.program.actions):
            found = [*waits.get(k, ()), *reductions.get(k, ())]
            found.sort(key=operator.itemgetter(0))
            made = tuple(collective for _, collective in found)
            actions.append(replace(action, collectives=made) if made else action)
        if head:
            stage = min(a.stage for a in actions)
            actions.insert(0, Action(ActionKind.GATHER, stage, collectives=tuple(head)))
        return Program(self.program.rank, tuple(actions))

    def _gathers(self) -> tuple[list[Collective], _Placed]:
        """The collectives that start with the step, and those at each use of a parameter."""
        places: list[tuple[int, int, _Use]] = []
        current, seen = None, set()
        for k, uses in enumerate(self.uses):
            for i, use in uses.reads:
                if use.bucket.is_gathered:
                    if use.bucket is current:
                        continue
                    current = use.bucket
                elif use.bucket.name in seen or not use.bucket.is_trained:
                    continue
                seen.add(use.bucket.name)
                places.append((k, i, use))
        head = [
            Collective(CollectiveKind.REFRESH, b.name)
            for b in self.buckets
            if b.name in seen and b.is_trained and b.shards.optimizer > b.shards.parameters
        ]
        gathered = [use.bucket for _, _, use in places if use.bucket.is_gathered]
        window = _Window(gathered, ahead(self.buckets))
        head += [Collective(CollectiveKind.GATHER, b.name) for b in window.first()]
        found: _Placed = {}
        for k, i, use in places:
            here = found.get(k)
            if here is None:
                here = found[k] = []
            here.append((i, use.at(CollectiveKind.WAIT)))
            if use.bucket.is_gathered:
                here += [(i, use.at(CollectiveKind.GATHER, then)) for then in window.read()]
        return head, found

    def _reductions(self) -> _Placed:
        """The places where reductions start."""
        found: _Placed = {}
        arrived: dict[str, set[str]] = {}
        for k, (action, uses) in enumerate(zip(self.program.actions, self.uses, strict=True)):
            for i, use in uses.gradients:
                name = use.bucket.name
                come = arrived.setdefault(name, set())
                come |= use.gradients
                if not come >= self.wanted[name]:
                    continue
                come.clear()
                if k == self.last[action.stage]:
                    found.setdefault(k, []).append((i, use.at(CollectiveKind.REDUCE)))
                elif use.bucket.shards.gradients > 1:
                    found.setdefault(k, []).append((i, use.at(CollectiveKind.SCATTER)))
        shared = [b for b in self.buckets if b.is_shared and self.wanted[b.name]]
        reduces = [k for k, a in enumerate(self.program.actions) if a.kind is ActionKind.REDUCE]
        if reduces and shared:
            shared.sort(key=lambda b: max(self.wanted[b.name]))
            found[reduces[-1]] = [(0, Collective(CollectiveKind.REDUCE, b.name)) for b in shared]
        return found
