"""The calls of a step on communicators: which ranks make which, on a GPU, and in which order.

NCCL has no tags. What is called on one communicator runs in the order of the calls, each once all
its ranks have called it, on a stream of its own behind what its caller's stream had been given. The
runtime opens these communicators and makes these calls; `merakc.simulation.nccl` proves that they
come to their end.

Each way between two stages' ranks, activations and gradients apart, is a communicator of two ranks:
NCCL's connections are then the same whether they are made with the group or when ranks first meet,
and a receive that is posted ahead holds up nothing but what comes behind it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache

from merakc.analysis.buckets import BucketSpec
from merakc.ir.program import (
    LOOKAHEAD,
    Action,
    ActionKind,
    Collective,
    CollectiveKind,
    Mesh,
    Program,
    Transfer,
)
from merakc.ir.state import Role, StateShards
from merakc.kernels.collectives import AXES

Way = tuple[int, int, bool]  # from one rank to another, and whether gradients travel
# Reductions that computing runs ahead of: it waits for the one before these.
IN_FLIGHT = 1
COLLECTIVES = "collectives"  # of what is no message


class Stream(StrEnum):
    """A stream of a rank that makes calls."""

    COMPUTE = "computing"
    ASIDE = "reductions"  # beside it: each step of a reduction behind the one before


@dataclass(frozen=True, slots=True, order=True)
class Communicator:
    """Some ranks that are connected for a purpose; of a way, sender and receiver in this order."""

    purpose: str
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.purpose} of ranks {', '.join(map(str, self.ranks))}"


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One call of one rank, in an action; all `ends`, the ranks that it joins, call for `what`."""

    communicator: Communicator
    ends: tuple[int, ...]
    what: str
    at: str
    stream: Stream = Stream.COMPUTE
    is_message: bool = False

    def __str__(self) -> str:
        return f"{self.what} on the communicator '{self.communicator}', in '{self.at}'"


@dataclass(frozen=True, slots=True, eq=False)
class Wait:
    """A stream goes on once a call has ended."""

    call: Call
    stream: Stream = Stream.COMPUTE


@dataclass(frozen=True, slots=True)
class Join:
    """A stream goes on once another has come to where it is now."""

    stream: Stream
    other: Stream


@dataclass(frozen=True, slots=True)
class Sync:
    """The host may wait here for the computing, as to read a number does."""


Event = Call | Wait | Join | Sync


@dataclass(frozen=True, slots=True)
class Wiring:
    """What is known of a step's communication beside its Programs.

    `buckets` are those of each pipeline rank. `tied` are the pipeline ranks that share parameters
    in no bucket. Where graphs are `overlapped`, collectives over tp are waited for at their end.
    Messages go over communicators of the two ranks, or `over_axis`, those of all pipeline ranks, as
    gloo's do, which has tags.
    """

    mesh: Mesh
    rank_of: tuple[int, ...]
    buckets: Mapping[int, Sequence[BucketSpec]] = field(default_factory=dict)
    tied: tuple[tuple[int, ...], ...] = ()
    overlapped: bool = False
    over_axis: bool = False


def ways(rank_of: Sequence[int], transfers: Iterable[Transfer]) -> tuple[Way, ...]:
    """Over which ways pipeline ranks exchange messages, in order."""
    found: set[Way] = set()
    for transfer in transfers:
        source, target = rank_of[transfer.source_stage], rank_of[transfer.target_stage]
        if source != target:
            found.add((source, target, False))
            if transfer.grad:
                found.add((target, source, True))
    return tuple(sorted(found))


def purpose(way: Way) -> str:
    """What a communicator of a way is for."""
    source, target, is_grad = way
    what = "gradients" if is_grad else "activations"
    return f"{what} {'up' if target > source else 'down'}"


def receives_ahead(program: Program) -> tuple[range, ...]:
    """Which actions' receives are posted before each action: those that none before has posted, up
    to the `LOOKAHEAD`-th compute from it on.
    """
    actions, found, posted = program.actions, [], 0
    ends = [k + 1 for k, a in enumerate(actions) if a.kind.is_compute][LOOKAHEAD - 1 :]
    for action in actions:
        end = ends[0] if ends else len(actions)
        found.append(range(posted, end))
        posted = end
        if action.kind.is_compute and ends:
            del ends[0]
    return tuple(found)


def step_calls(program: Program, wiring: Wiring) -> tuple[Event, ...]:
    """What one rank's host does in a step that concerns others, in its order."""
    return tuple(_Walk(program, wiring).run())


class _Walk:
    """The walk along one Program."""

    def __init__(self, program: Program, wiring: Wiring) -> None:
        self.program, self.wiring = program, wiring
        self.mesh = wiring.mesh
        self.place = self.mesh.coordinates(program.rank)
        self.specs = {b.name: b for b in wiring.buckets.get(self.place[1], ())}
        self.received: dict[int, Call] = {}
        self.sent: list[Call] = []
        self.gathered: dict[str, Call] = {}
        self.reduced: dict[str, Call] = {}  # the last calls of reductions that are not waited for

    def run(self) -> Iterator[Event]:
        """All events in order."""
        actions = self.program.actions
        reduces = [k for k, a in enumerate(actions) if a.kind is ActionKind.REDUCE]
        for k, ahead in enumerate(receives_ahead(self.program)):
            yield from self._post(ahead)
            action = actions[k]
            remote = action.kind.is_message and action.peer != self.program.rank
            if remote and action.kind is ActionKind.SEND:
                self.sent.append(self._message(action))
                yield self.sent[-1]
            elif remote:
                yield Wait(self.received.pop(k))
                yield Sync()
            elif not action.kind.is_message:
                yield from self._work(action)
            if reduces and k == reduces[-1]:
                yield from self._reduce(action)
        yield from map(Wait, self.sent)
        yield Sync()

    def _post(self, ahead: range) -> Iterator[Event]:
        for k in ahead:
            action = self.program.actions[k]
            if action.kind is ActionKind.RECV and action.peer != self.program.rank:
                self.received[k] = self._message(action)
                yield self.received[k]

    def _message(self, action: Action) -> Call:
        ends = self.program.rank, action.peer
        ends = ends if action.kind is ActionKind.SEND else ends[::-1]
        way = *ends, action.is_grad
        ranks = self._along("pp") if self.wiring.over_axis else ends
        value, is_grad, micro_batch, source, target = action.message
        what = f"{'gradient of ' * is_grad}{value} {micro_batch} from stage {source} to {target}"
        return Call(Communicator(purpose(way), ranks), ends, what, str(action), is_message=True)

    def _work(self, action: Action) -> Iterator[Event]:
        """What an action that is no message does: between the collectives over dp, those over tp
        and cp that a graph may have.
        """
        late: list[Event] = []
        for turn, one in enumerate((*action.collectives, None)):
            if action.kind.is_compute:
                over_tp = [
                    event
                    for axis in AXES
                    for event in self._waited(
                        self._along(axis), f"collective {turn} of {action} over {axis}", action
                    )
                ]
                at_once = len(over_tp) - self.wiring.overlapped
                yield from over_tp[:at_once]
                late += over_tp[at_once:]
            if one is not None:
                yield from self._collective(action, one)
        yield from late
        if action.kind is ActionKind.HEAD:
            yield from self._waited(self._along("dp"), "samples of all dp ranks", action)
        yield Sync()

    def _waited(self, ranks: tuple[int, ...], what: str, action: Action) -> Iterator[Event]:
        """What the computing waits for at once."""
        if len(ranks) > 1:
            call = Call(Communicator(COLLECTIVES, ranks), ranks, what, str(action))
            yield call
            yield Wait(call)

    def _along(self, axis: str) -> tuple[int, ...]:
        """The ranks of an axis of the mesh that this one is on."""
        mesh, (dp, pp, lane) = self.mesh, self.place
        on_tp, on_cp = lane % mesh.tp, lane // mesh.tp
        places = {
            "dp": [(d, pp, lane) for d in range(mesh.dp)],
            "pp": [(dp, p, lane) for p in range(mesh.pp)],
            "tp": [(dp, pp, on_cp * mesh.tp + t) for t in range(mesh.tp)],
            "cp": [(dp, pp, c * mesh.tp + on_tp) for c in range(mesh.cp)],
        }
        return tuple(sorted(mesh.rank(*place) for place in places[axis]))

    def _collective(self, action: Action, one: Collective) -> Iterator[Event]:
        if one.kind is CollectiveKind.WAIT:
            if one.bucket in self.gathered:
                yield Wait(self.gathered.pop(one.bucket))
        elif one.kind in (CollectiveKind.GATHER, CollectiveKind.REFRESH):
            role = Role.GATHER if one.kind is CollectiveKind.GATHER else Role.REFRESH
            if one.bucket in self.gathered:  # what is gathered has been refreshed
                yield Wait(self.gathered.pop(one.bucket))
            for call in self._over_dp(action, one, [role], Stream.COMPUTE):
                self.gathered[one.bucket] = call
                yield call
        else:
            yield from self._reduction(action, one)

    def _reduction(self, action: Action, one: Collective) -> Iterator[Event]:
        """Beside the computing, which waits for the one before those that may be in flight."""
        roles = self.specs[one.bucket].shards.reduction(last=one.kind is CollectiveKind.REDUCE)
        calls = self._over_dp(action, one, roles, Stream.ASIDE)
        while self.reduced and (one.bucket in self.reduced or len(self.reduced) > IN_FLIGHT):
            yield Wait(self.reduced.pop(next(iter(self.reduced))))
        yield Join(Stream.ASIDE, Stream.COMPUTE)
        for call in calls:
            yield call
            yield Wait(call, Stream.ASIDE)
            self.reduced[one.bucket] = call

    def _over_dp(
        self, action: Action, one: Collective, roles: Iterable[Role], stream: Stream
    ) -> Iterator[Call]:
        """The calls of one collective over dp, in their order, of groups with several ranks."""
        spec = self.specs[one.bucket]
        mesh = self.mesh.sharers(of_experts=spec.of_experts)
        sharing, place = mesh.sharing(self.program.rank), mesh.state_rank(self.program.rank)
        for role in roles:
            same = _alike(spec.shards, role, place, len(sharing))
            ranks = tuple(sorted(sharing[p] for p in same))
            if len(ranks) > 1:
                of = Communicator(COLLECTIVES, ranks)
                yield Call(of, ranks, f"{one.kind} {one.bucket} ({role})", str(action), stream)

    def _reduce(self, action: Action) -> Iterator[Event]:
        """The end of all reductions, and the sums over what holds the same parameters."""
        yield from map(Wait, self.reduced.values())
        self.reduced.clear()
        own = self.place[1]
        found = [
            (b.name, {self.wiring.rank_of[s] for s in b.stages})
            for b in self.specs.values()
            if b.is_trained
        ]
        found += [("", set(ranks)) for ranks in self.wiring.tied if own in ranks]
        for name, ranks in found:
            held = tuple(sorted(self.mesh.rank(self.place[0], r, self.place[2]) for r in ranks))
            yield from self._waited(held, f"gradients of shared parameters {name}", action)
        yield Sync()


@cache
def _alike(shards: StateShards, role: Role, place: int, ranks: int) -> tuple[int, ...]:
    """The places of the ranks of one group with this one, of so many that share their state."""
    own = shards.key(role, place)
    return tuple(p for p in range(ranks) if shards.key(role, p) == own)
