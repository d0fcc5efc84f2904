"""The check of the collectives over dp of a step, before any rank starts one.

A collective has no tag: what one dp rank starts as its fifth is the fifth of the others too,
whatever it is. So the ranks that share parameters must start the same ones in the same order, in
the same places of the same computes; and on each rank, what is read must have been gathered, and
what is summed must be reduced, once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest

from merakc.analysis.buckets import BucketSpec
from merakc.errors import ProgramError
from merakc.ir.program import Action, ActionKind, Collective, CollectiveKind, Mesh, Program
from merakc.passes.programs.collectives import Touch, Touches

STARTED = (CollectiveKind.REFRESH, CollectiveKind.GATHER)  # early; before what waits for them
SUMMED = (ActionKind.BACKWARD, ActionKind.WEIGHT_GRAD, ActionKind.REDUCE)
Placed = tuple[Action, Collective]


def verify_collectives(programs: Sequence[Program], mesh: Mesh | None = None) -> None:
    """Checks the collectives of a step: those of each rank, and on a `mesh` that all dp ranks of a
    part have the same.

    A bucket is read only after it was gathered, or refreshed as the step began; two are held at a
    time, that which is read last and the next, so that none of them is gathered again; gradients
    are scattered once for each micro-batch but the last, with which they are reduced, once. What a
    compute reads and makes is not known here: `verify_uses` checks that.

    Raises `ProgramError`, which names the rank, the action and the collective.
    """
    for program in programs:
        for action, collective, fault in _faults(program):
            raise ProgramError(f"rank {program.rank}, {action}: {collective} {fault}")
    first: dict[int, Program] = {}
    for program in programs if mesh else ():
        assert mesh is not None
        first_rank = mesh.sharing(program.rank)[0]
        if (other := first.setdefault(first_rank, program)) is not program:
            _verify_same(other, program)


def verify_uses(
    program: Program,
    touches: Mapping[int, Touches],
    buckets: Sequence[BucketSpec],
    trained: Collection[str],
) -> None:
    """Checks that a rank's collectives are where its graphs want them: each bucket is waited for
    where it is read first, and nowhere else; its gradients are reduced where the last of them is
    made, and scattered in micro-batches before that.

    What all dp ranks have wrong alike is seen here. Raises `ProgramError` as `verify_collectives`.
    """
    uses = _Uses(program, touches, buckets, trained)
    for k, action in enumerate(program.actions):
        bare = (replace(c, share=0.0) for c in action.collectives if c.kind not in STARTED)
        for own, wanted in zip_longest(bare, uses.of(k)):
            if own != wanted:
                told = f"has {own or 'no more'}, and its graph wants {wanted or 'no more'}"
                where = replace(action, collectives=())
                raise ProgramError(f"rank {program.rank}, {where}: {told} there")


class _Uses:
    """What a Program's graphs want of collectives, action by action, in order."""

    def __init__(
        self,
        program: Program,
        touches: Mapping[int, Touches],
        buckets: Sequence[BucketSpec],
        trained: Collection[str],
    ) -> None:
        self.program, self.touches, self.trained = program, touches, trained
        self.buckets = {name: bucket for bucket in buckets for name in bucket.members}
        actions = program.actions
        self.again = {(a.stage, a.micro_batch) for a in actions if a.kind is ActionKind.RECOMPUTE}
        self.last = {a.stage: k for k, a in enumerate(actions) if a.kind in SUMMED[:2]}
        self.reduces = max((k for k, a in enumerate(actions) if a.kind is SUMMED[2]), default=-1)
        every = (t for s in self.last for found in touches[s].values() for t in found)
        made = {t.parameter for t in every if t.is_gradient} & set(trained)
        self.missing = {b.name: made & set(b.members) for b in buckets}
        self.wanted = {name: set(found) for name, found in self.missing.items()}
        shared = [b.name for b in buckets if b.is_shared and self.wanted[b.name]]
        self.shared = sorted(shared, key=lambda name: max(self.wanted[name]))  # by the last one
        self.current = ""  # the sharded bucket that was read last
        self.refreshed: set[str] = set()

    def of(self, position: int) -> Iterator[Collective]:
        """Of the next action."""
        action = self.program.actions[position]
        if position == self.reduces:
            yield from (Collective(CollectiveKind.REDUCE, name) for name in self.shared)
        if not action.kind.is_compute:
            return
        key = action.kind, (action.stage, action.micro_batch) in self.again
        for touch in self.touches[action.stage].get(key, ()):
            bucket = self.buckets.get(touch.parameter)
            if bucket is None:
                continue
            kind = self._made(position, touch, bucket) if touch.is_gradient else self._read(bucket)
            if kind is not None:
                yield Collective(kind, bucket.name, touch.node)

    def _read(self, bucket: BucketSpec) -> CollectiveKind | None:
        name = bucket.name
        if bucket.is_gathered:
            seen, self.current = self.current == name, name
        else:
            seen = name in self.refreshed or not bucket.is_waited_for or not bucket.is_trained
            self.refreshed.add(name)
        return None if seen else CollectiveKind.WAIT

    def _made(self, position: int, touch: Touch, bucket: BucketSpec) -> CollectiveKind | None:
        missing = self.missing[bucket.name]
        if bucket.is_shared or touch.parameter not in missing:
            return None
        missing.discard(touch.parameter)
        if missing:
            return None
        missing |= self.wanted[bucket.name]
        if position == self.last[self.program.actions[position].stage]:
            return CollectiveKind.REDUCE
        return CollectiveKind.SCATTER if bucket.shards.gradients > 1 else None


def _placed(program: Program) -> list[Placed]:
    bare = ((replace(action, collectives=()), action.collectives) for action in program.actions)
    return [(action, one) for action, found in bare for one in found]


def _verify_same(one: Program, other: Program) -> None:
    """Checks that two dp ranks of a part start the same collectives in the same places."""
    for mine, theirs in zip_longest(_placed(one), _placed(other)):
        if mine != theirs:
            told = [f"{pair[1]} in {pair[0]}" if pair else "none" for pair in (mine, theirs)]
            raise ProgramError(
                f"rank {other.rank} has the collective {told[1]} where rank {one.rank} has "
                f"{told[0]}; ranks that share parameters must start the same in the same order"
            )


def _faults(program: Program) -> Iterator[tuple[Action, Collective, str]]:
    """What is wrong with the collectives of one rank."""
    refreshed: set[str] = set()
    held: tuple[str, ...] = ()
    current: tuple[str, ...] = ()  # the sharded bucket that is read last
    read: set[str] = set()
    scattered: Counter[str] = Counter()
    reduced: set[str] = set()
    last: dict[tuple[CollectiveKind, str], Placed] = {}
    for k, action in enumerate(program.actions):
        seen: set[tuple[CollectiveKind, str]] = set()
        for one in action.collectives:
            kind, bucket = one.kind, one.bucket
            last[kind, bucket] = action, one
            if kind is CollectiveKind.REFRESH:
                if k or action.kind is not ActionKind.GATHER or bucket in refreshed:
                    yield action, one, "must start once, as the step begins"
                refreshed.add(bucket)
            elif kind is CollectiveKind.GATHER:
                if bucket in held:
                    yield action, one, "starts while its parameters are there"
                held = (*(b for b in held if b in current or b not in read), bucket)
                read.discard(bucket)
            elif kind is CollectiveKind.WAIT:
                if bucket not in held and bucket not in refreshed:
                    yield action, one, "waits for parameters that nothing has gathered"
                current = (bucket,) if bucket in held else current
                read.add(bucket)
            else:
                if action.kind not in SUMMED or (kind, bucket) in seen:
                    yield action, one, "stands where no gradient of it is made"
                if bucket in reduced:
                    yield action, one, "comes after its gradients were reduced"
                if kind is CollectiveKind.REDUCE:
                    reduced.add(bucket)
                else:
                    scattered[bucket] += 1
            seen.add((kind, bucket))
    for (kind, bucket), (action, one) in last.items():
        if kind in (CollectiveKind.GATHER, CollectiveKind.REFRESH) and bucket not in read:
            yield action, one, "is never waited for"
        if kind is CollectiveKind.SCATTER:
            wanted = _backwards(program, action.stage) - 1
            if bucket not in reduced or scattered[bucket] != wanted:
                yield action, one, f"must come {wanted} times, and then its reduction"


def _backwards(program: Program, stage: int) -> int:
    return sum(a.stage == stage and a.kind in SUMMED[:2] for a in program.actions)
