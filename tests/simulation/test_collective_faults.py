"""Collectives over dp with a fault put in, and what sees it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from benchmarks.mutated_programs import MESH, SCHEDULES, SHARDS, complaint, mutate, placed
from merakc.errors import ProgramError
from merakc.ir.program import CollectiveKind, Program
from merakc.simulation.collective_faults import STARTED, verify_collectives

LAYOUTS = [(shards, schedule) for shards in SHARDS for schedule in SCHEDULES]


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


@pytest.mark.parametrize(("shards", "schedule"), LAYOUTS)
def test_what_all_dp_ranks_have_wrong_alike_is_seen(shards: str, schedule: str) -> None:
    """But for collectives that start earlier or later, before what waits for them."""
    programs = placed(shards, schedule)
    assert not complaint(programs, shards, schedule)
    draw = random.Random(1)
    tried = escaped = 0
    while tried < 60:
        rank = draw.randrange(MESH.pp)
        made = mutate(programs[rank], draw)
        if made == programs[rank]:
            continue
        tried += 1
        other = MESH.rank(1, MESH.coordinates(rank)[1], 0)
        wrong = list(programs)
        wrong[rank], wrong[other] = made, Program(other, made.actions)
        if not complaint(wrong, shards, schedule):
            escaped += 1
            for own, right in zip(made.actions, programs[rank].actions, strict=True):
                bare = [c for c in own.collectives if c.kind not in STARTED]
                assert bare == [c for c in right.collectives if c.kind not in STARTED]
    assert escaped <= 6
