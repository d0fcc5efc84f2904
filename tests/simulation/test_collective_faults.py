"""Collectives over dp with a fault put in, and what sees it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest

from benchmarks.models import MODELS
from merakc.errors import ProgramError
from merakc.ir.program import CollectiveKind, Mesh, Program
from merakc.ir.state import parse_shards
from merakc.lowering.lowered import make_plan
from merakc.machines.cluster import NOMINAL_CPU
from merakc.simulation.collective_faults import verify_collectives
from tests.recorded import one_of_several

MESH = Mesh(dp=2, pp=2)
LAYOUTS = [
    (shards, schedule)
    for shards in ("zero-0", "zero-1", "zero-2", "zero-3")
    for schedule in ("1f1b", "zb-h1", "interleaved-1f1b")
]


@cache
def placed(shards: str, schedule: str) -> tuple[Program, ...]:
    case = MODELS["gpt2"]
    recording = one_of_several(case.model(), case.batch(2))
    plan, lowered = make_plan(recording, MESH, 4, NOMINAL_CPU, batch_size=8, schedule=schedule)
    plan = replace(plan, state_shards=parse_shards(shards, MESH.dp, len(plan.rank_of)))
    lowered = replace(lowered, plan=plan)
    return lowered.with_collectives(lowered.programs())


def mutate(program: Program, draw: random.Random) -> Program:
    """One collective dropped, doubled, moved to another action, exchanged or changed."""
    actions = list(program.actions)
    places = [k for k, a in enumerate(actions) if a.collectives]
    here, there = draw.choice(places), draw.choice(places)
    own = list(actions[here].collectives)
    at, how = draw.randrange(len(own)), draw.randrange(5)
    if how == 0:
        del own[at]
    elif how == 1:
        own.insert(at, own[at])
    elif how == 2:
        own[at] = replace(own[at], kind=draw.choice([*CollectiveKind]))
    elif how == 3:
        own.reverse()
    else:
        moved = own.pop(at)
        actions[here] = replace(actions[here], collectives=tuple(own))
        own, here = [*actions[there].collectives, moved], there
    actions[here] = replace(actions[here], collectives=tuple(own))
    return Program(program.rank, tuple(actions))


def refused(programs: Sequence[Program]) -> bool:
    try:
        verify_collectives(programs, MESH)
    except ProgramError:
        return True
    return False


@pytest.mark.parametrize(("shards", "schedule"), LAYOUTS)
def test_no_fault_of_one_rank_is_accepted(shards: str, schedule: str) -> None:
    programs = placed(shards, schedule)
    verify_collectives(programs, MESH)
    draw = random.Random(0)
    tried = 0
    while tried < 50:
        rank = draw.randrange(MESH.world_size)
        made = mutate(programs[rank], draw)
        if made == programs[rank]:
            continue
        tried += 1
        assert refused([*programs[:rank], made, *programs[rank + 1 :]])


@pytest.mark.parametrize("shards", ["zero-1", "zero-2", "zero-3"])
@pytest.mark.parametrize("kind", CollectiveKind)
def test_what_all_ranks_leave_out_or_do_twice_is_seen(shards: str, kind: CollectiveKind) -> None:
    programs = placed(shards, "1f1b")
    for program in programs:
        for k, action in enumerate(program.actions):
            at = next((i for i, c in enumerate(action.collectives) if c.kind is kind), None)
            if at is None:
                continue
            own = action.collectives
            if kind is not CollectiveKind.WAIT:  # to wait twice does no harm
                twice = (*own[: at + 1], *own[at:])
                assert _alone(program, k, twice), (k, action, own[at])
            if kind in (CollectiveKind.REFRESH, CollectiveKind.GATHER, CollectiveKind.SCATTER):
                assert _alone(program, k, (*own[:at], *own[at + 1 :])), (k, action, own[at])


def _alone(program: Program, k: int, collectives: tuple[object, ...]) -> bool:
    """Whether a rank's own faults are refused."""
    actions = list(program.actions)
    actions[k] = replace(actions[k], collectives=collectives)  # type: ignore[arg-type]
    return refused([Program(program.rank, tuple(actions))])
