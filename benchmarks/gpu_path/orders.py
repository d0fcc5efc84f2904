"""Steps of every kind under NCCL's rules, and what is put into them that must be refused.

Stages hold two parameters each; the last one shares another with the first, as tied embeddings do.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import product

import torch

from merakc.analysis.buckets import BucketSpec, Held, plan_buckets
from merakc.analysis.calls import Call, Communicator, Event, Stream, Wait, Wiring, step_calls
from merakc.errors import ConfigError, ProgramError
from merakc.ir.program import ActionKind, Mesh, Program, Transfer
from merakc.ir.schedule import Schedule
from merakc.ir.state import StateShards
from merakc.passes.programs.collectives import Touch, Touches, placed_collectives
from merakc.passes.programs.schedule import build_programs
from merakc.schedules.registry import KNOWN, make_schedule
from merakc.simulation.faults import verify_programs
from merakc.simulation.nccl import Connecting, run_calls

RANKS = (2, 3, 4, 5, 6, 8, 12, 16)
FEW, MIDDLE = 5, 8  # up to so many ranks all layouts, or all sizes
ROUNDS = (1, 2, 3)  # micro-batches a rank
LAYOUTS = (  # dp, shards, tp, whether collectives over tp and cp run under computing, cp
    (1, (1, 1, 1), 1, False, 1),
    (1, (1, 1, 1), 2, True, 1),
    (2, (1, 1, 1), 1, False, 1),
    (2, (1, 1, 2), 1, False, 1),
    (2, (1, 2, 2), 2, True, 1),
    (2, (2, 2, 2), 1, False, 1),
    (2, (2, 2, 2), 2, True, 1),
    (4, (2, 2, 4), 1, False, 1),
    (1, (1, 1, 2), 1, False, 2),
    (1, (2, 2, 2), 2, True, 2),
)
CONNECTING: tuple[Connecting, ...] = ("eager", "lazy")
Scripts = Mapping[int, Sequence[Event]]


@dataclass(frozen=True)
class Case:
    """A step of a plan."""

    name: str
    pp: int
    micro_batches: int
    skips: bool
    dp: int = 1
    shards: tuple[int, int, int] = (1, 1, 1)
    tp: int = 1
    overlapped: bool = False
    cp: int = 1
    over_axis: bool = False

    @property
    def mesh(self) -> Mesh:
        """Its ranks."""
        return Mesh(dp=self.dp, tp=self.tp, pp=self.pp, cp=self.cp)

    @property
    def has_buckets(self) -> bool:
        """Whether ranks share their state."""
        return self.mesh.state_ranks > 1

    def schedule(self) -> Schedule:
        """Its order of work. Raises `ConfigError` where there is none of that size."""
        return make_schedule(self.name, self.pp, self.micro_batches)

    def transfers(self, stages: int) -> list[Transfer]:
        """A value from each stage to the next, and perhaps one from the first to every third and
        to the last, and a mask from the second to the last.
        """
        found = [Transfer("x", s, s + 1, 24, True) for s in range(stages - 1)]
        if self.skips:
            targets = {*range(2, stages, 3), stages - 1} - {0, 1}
            found += [Transfer("y", 0, s, 24, True) for s in sorted(targets)]
            found += [Transfer("mask", 1, stages - 1, 8, False)] * (stages > 3)
        return found

    def wiring(self, schedule: Schedule) -> Wiring:
        """Its communication beside the Programs."""
        rank_of, shards = schedule.rank_of, StateShards(*self.shards)
        ends = 0, len(rank_of) - 1
        apart = rank_of[ends[0]] != rank_of[ends[1]]
        found: dict[int, tuple[BucketSpec, ...]] = {}
        for rank in range(self.pp if self.has_buckets else 0):
            own = [s for s, r in enumerate(rank_of) if r == rank]
            held = [Held(f"{w}{s}", torch.float32, 8, (s,), True) for s in own for w in "ab"]
            if rank in (rank_of[ends[0]], rank_of[ends[1]]):
                held.append(Held("tied", torch.float32, 8, ends, True, is_shared=not apart))
            found[rank] = plan_buckets(held, lambda _: shards, bucket_bytes=1)
        tied = (tuple(sorted(rank_of[s] for s in ends)),) if apart and not self.has_buckets else ()
        return Wiring(self.mesh, rank_of, found, tied, self.overlapped, self.over_axis)

    def programs(self, schedule: Schedule, wiring: Wiring) -> tuple[Program, ...]:
        """Those of all ranks."""
        stages = len(schedule.rank_of)
        plain = build_programs(self.mesh, schedule, self.transfers(stages))
        verify_programs(plain, micro_batches=self.micro_batches, training=True)
        if not self.has_buckets:
            return plain
        touched = {s: _touches(s, stages) for s in range(stages)}
        names = {n for own in wiring.buckets.values() for b in own for n in b.members}
        return placed_collectives(plain, self.mesh, touched, wiring.buckets.__getitem__, names)


def _touches(stage: int, stages: int) -> Touches:
    names = [f"a{stage}", f"b{stage}"]
    names = ["tied", *names] if stage == 0 else [*names, "tied"] if stage == stages - 1 else names
    forward = tuple(Touch(n, False, n, 0.0) for n in names)
    reads = tuple(Touch(n, False, n, 0.0) for n in reversed(names))
    made = tuple(Touch(n, True, n, 1.0) for n in reversed(names))
    return {
        (kind, again): {
            ActionKind.BACKWARD: reads + made, ActionKind.INPUT_GRAD: reads,
            ActionKind.WEIGHT_GRAD: made,
        }.get(kind, forward)
        for kind in ActionKind if kind.is_compute for again in (False, True)
    }  # fmt: skip


def cases() -> Iterator[Case]:
    """All schedules on all numbers of ranks and micro-batches, with and without skips, on all
    layouts of state and of other axes; on many pipeline ranks every third of these, in turns, and
    on most the smaller ones.
    """
    grid = product(KNOWN, RANKS, ROUNDS, (False, True))
    for turn, (name, pp, rounds, skips) in enumerate(grid):
        for k, (dp, shards, tp, overlapped, cp) in enumerate(LAYOUTS):
            case = Case(name, pp, pp * rounds, skips, dp, shards, tp, overlapped, cp)
            taken = pp <= FEW or (k + turn) % 3 == 0
            if pp > MIDDLE and (rounds > 1 or dp * tp * cp > 2):
                taken = False
            if taken and _exists(case):
                yield case


def _exists(case: Case) -> bool:
    try:
        case.schedule()
    except ConfigError:
        return False
    return True


def complaint(case: Case, connecting: Connecting) -> str:
    """What is said against a step, or nothing."""
    return _told(scripts_of(case), connecting)


def scripts_of(case: Case) -> Scripts:
    """What each rank does."""
    schedule = case.schedule()
    wiring = case.wiring(schedule)
    return {p.rank: step_calls(p, wiring) for p in case.programs(schedule, wiring)}


def _told(scripts: Scripts, connecting: Connecting = "eager", *, opened: bool = True) -> str:
    try:
        run_calls(scripts, connecting, lambda _: opened)
    except ProgramError as error:
        return str(error)
    return ""


# ---------------------------------------------------------------------- sabotages

SABOTAGED = Case("1f1b", 4, 8, skips=True, dp=2, shards=(1, 2, 2), tp=2)
_cached = cache(scripts_of)


def _one_rank(change: Callable[[list[Event], random.Random], None], case: Case, seed: int) -> str:
    draw = random.Random(seed)
    scripts = {rank: list(own) for rank, own in _cached(case).items()}
    change(scripts[draw.randrange(len(scripts))], draw)
    return _told(scripts)


def _places(events: list[Event], wanted: Callable[[Call], bool]) -> list[int]:
    return [k for k, e in enumerate(events) if isinstance(e, Call) and wanted(e)]


def _swap(events: list[Event], draw: random.Random, wanted: Callable[[Call], bool]) -> None:
    """Exchanges two neighbours among the calls of a kind on one communicator, with their waits."""
    calls = [events[k] for k in _places(events, wanted)]
    several = [e for e in calls if isinstance(e, Call)]
    count = Counter(e.communicator for e in several)
    chosen = draw.choice([e.communicator for e in several if count[e.communicator] > 1])
    places = _places(events, lambda call: wanted(call) and call.communicator == chosen)
    k = draw.randrange(len(places) - 1)
    one, other = (events[at] for at in places[k : k + 2])
    swapped = {one: other, other: one}
    for at, event in enumerate(events):
        if isinstance(event, Call):
            events[at] = swapped.get(event, event)
        elif isinstance(event, Wait) and event.call in swapped:
            events[at] = Wait(swapped[event.call], event.stream)


def _drop(events: list[Event], draw: random.Random, wanted: Callable[[Call], bool]) -> None:
    """Leaves one call out, and what waits for it."""
    gone = events[draw.choice(_places(events, wanted))]
    events[:] = [e for e in events if gone not in (e, e.call if isinstance(e, Wait) else None)]


def _late(events: list[Event], draw: random.Random) -> None:
    """Starts a reduction only behind the next, as a rank did that found it ended late."""
    places = _places(events, _reduces)
    k = draw.randrange(len(places) - 1)
    call = events.pop(places[k])
    assert isinstance(call, Call)
    later = places[k + 1]  # right behind that call, which now stands one earlier
    wait = next(at for at, e in enumerate(events) if isinstance(e, Wait) and e.call is call)
    del events[wait]
    later -= wait < later
    events[later:later] = [call, Wait(call, Stream.ASIDE)]


def _reduces(call: Call) -> bool:
    return call.stream is Stream.ASIDE


def _over_tp(call: Call) -> bool:
    return call.what.endswith("over tp")


def _is_message(call: Call) -> bool:
    return call.is_message


def _merged(seed: int) -> str:
    """Both directions between two ranks over one communicator."""
    case = replace(SABOTAGED, dp=1, shards=(1, 1, 1), micro_batches=4 + 2 * seed)
    found: dict[int, list[Event]] = {}
    for rank, own in _cached(case).items():
        made: dict[Call, Call] = {}
        for event in own:
            if isinstance(event, Call) and event.is_message:
                one = Communicator("messages", tuple(sorted(event.ends)))
                made[event] = replace(event, communicator=one)
        found[rank] = [
            made.get(e, e) if isinstance(e, Call)
            else replace(e, call=made.get(e.call, e.call)) if isinstance(e, Wait) else e
            for e in own
        ]  # fmt: skip
    return _told(found)


def _unopened(seed: int) -> str:
    """Communicators that connect in the step, where hosts come to them in different orders."""
    case = replace(SABOTAGED, name=("interleaved-1f1b", "v-half", "zb-v")[seed % 3])
    found = {rank: list(own) for rank, own in _cached(case).items()}
    return _told(found, "lazy", opened=False)


def _whole_axis(seed: int) -> str:
    """Messages of all pipeline ranks over one communicator, connected with its group."""
    name = ("1f1b", "interleaved-1f1b", "v-min")[seed % 3]
    return complaint(replace(SABOTAGED, name=name, over_axis=True), "eager")


# By what is put in, which a seed varies.
SABOTAGES: dict[str, Callable[[int], str]] = {
    "messages of all pipeline ranks on one communicator": _whole_axis,
    "both directions on one communicator": _merged,
    "communicators that connect in the step": _unopened,
    "reductions in another order": partial(_one_rank, partial(_swap, wanted=_reduces), SABOTAGED),
    "a reduction that starts late": partial(_one_rank, _late, SABOTAGED),
    "a reduction left out": partial(_one_rank, partial(_drop, wanted=_reduces), SABOTAGED),
    "collectives over tp in another order": partial(
        _one_rank, partial(_swap, wanted=_over_tp), SABOTAGED
    ),
    "a collective over tp left out": partial(_one_rank, partial(_drop, wanted=_over_tp), SABOTAGED),
    "a message left out": partial(_one_rank, partial(_drop, wanted=_is_message), SABOTAGED),
    "messages in another order": partial(_one_rank, partial(_swap, wanted=_is_message), SABOTAGED),
}


@dataclass
class Orders:
    """What was found: of how many plans under each way to connect, and the sabotages caught."""

    plans: int = 0
    complaints: list[str] = field(default_factory=list)
    caught: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether nothing is said against the plans, and something against all sabotages."""
        return not self.complaints and all(n == of for n, of in self.caught.values())


def check(case: Case, found: Orders) -> None:
    """Adds one plan, under both ways to connect."""
    found.plans += 1
    scripts = scripts_of(case)
    for connecting in CONNECTING:
        if text := _told(scripts, connecting):
            found.complaints.append(f"{case}, {connecting}: {text}")


def sabotage(found: Orders, seeds: int) -> None:
    """Adds all kinds of sabotages, so many of each."""
    for kind, trial in SABOTAGES.items():
        found.caught[kind] = sum(bool(trial(seed)) for seed in range(seeds)), seeds
