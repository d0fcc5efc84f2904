"""`python -m benchmarks.mutated_programs`: Programs with a fault put in are refused, or do no harm.

Orders of work at random, with messages or computes dropped, doubled, moved, exchanged or changed;
those that the check accepts are run with names in place of tensors, which notices what would go
wrong. And Programs with their collectives over dp, with a fault on one rank, or on all that share
parameters alike: where one is accepted, only when something is started may differ.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.harness import finish
from benchmarks.models import MODELS
from benchmarks.mutated_orders import Faulty, Walk, mutated, refused
from merakc.errors import ProgramError
from merakc.ir.batches import BatchLayout
from merakc.ir.program import CollectiveKind, Mesh, Program, Transfer
from merakc.ir.state import parse_shards
from merakc.ir.strategy import Strategy
from merakc.lowering.lowered import Lowered, make_plan
from merakc.lowering.recording import record_part
from merakc.machines.cluster import NOMINAL_CPU
from merakc.passes.programs.collectives import rank_buckets, rough_touches, trained
from merakc.schedules.planned import forwards_first
from merakc.schedules.registry import make_schedule
from merakc.simulation.collective_faults import STARTED, verify_collectives, verify_uses

MESH = Mesh(dp=2, pp=2)
SHARDS = ("zero-0", "zero-1", "zero-2", "zero-3")
SCHEDULES = ("1f1b", "zb-h1", "interleaved-1f1b")
REFUSED, HARMLESS, ESCAPED = "refused", "accepted, harmless", "escaped"
MOST_ESCAPES = 0.005


def of_orders(draw: random.Random) -> str:
    """What becomes of one mutated order of work."""
    name, pp = draw.choice(("1f1b", "gpipe", "zb-h1")), draw.randint(1, 3)
    micro_batches = draw.randint(1, 4)
    schedule = make_schedule(name, pp, micro_batches)
    transfers = [Transfer(f"h{s}", s, s + 1, 8, True) for s in range(pp - 1)]
    if pp > 2:
        transfers += [Transfer("h0", 0, 2, 8, True), Transfer("mask", 0, 2, 8, False)]
    head = draw.choice([None, *range(pp)])
    schedule = schedule if head is None else forwards_first(schedule)
    programs = mutated(schedule, transfers, draw, head)
    if refused(programs, micro_batches, head):
        return REFUSED
    try:
        Walk(programs, transfers, head).run(pp, micro_batches)
    except Faulty:
        return ESCAPED
    return HARMLESS


@cache
def lowered_of(shards: str, schedule: str) -> Lowered:
    """A GPT-2 on dp and pp of two ranks."""
    case = MODELS["gpt2"]
    layout = BatchLayout((2, 2), 1)  # a batch that is one part of several
    recording = record_part(case.model(), (), case.batch(2), layout, torch.device("cpu"))
    lowered = make_plan(
        recording,
        Strategy().on(MESH, micro_batches=4, batch_size=8, schedule=schedule),
        NOMINAL_CPU,
    )
    plan = lowered.plan
    plan = replace(plan, state_shards=parse_shards(shards, MESH.dp, len(plan.rank_of)))
    return replace(lowered, plan=plan)


@cache
def placed(shards: str, schedule: str) -> tuple[Program, ...]:
    """Its Programs, with collectives."""
    lowered = lowered_of(shards, schedule)
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


def complaint(programs: Sequence[Program], shards: str, schedule: str) -> str:
    """What the checks say of Programs with collectives, or nothing."""
    lowered = lowered_of(shards, schedule)
    local = lowered.stages.local
    touches = {s: rough_touches(graph) for s, graph in enumerate(local)}
    try:
        verify_collectives(programs, MESH)
        for program in programs:
            buckets = rank_buckets(lowered.plan, local)[MESH.coordinates(program.rank)[1]]
            verify_uses(program, touches, buckets, trained(lowered.loss.graph))
    except ProgramError as error:
        return str(error)
    return ""


def of_collectives(draw: random.Random, *, alike: bool) -> str:
    """What becomes of a collective that is mutated on one rank, or on all dp ranks alike."""
    shards, schedule = draw.choice(SHARDS), draw.choice(SCHEDULES)
    programs = list(placed(shards, schedule))
    rank = draw.randrange(MESH.pp if alike else MESH.world_size)
    made = programs[rank]
    while made == programs[rank]:
        made = mutate(programs[rank], draw)
    right, programs[rank] = programs[rank], made
    if alike:
        other = MESH.rank(1, MESH.coordinates(rank)[1], 0)
        programs[other] = Program(other, made.actions)
    if complaint(programs, shards, schedule):
        return REFUSED
    same = all(
        [c for c in own.collectives if c.kind not in STARTED]
        == [c for c in as_was.collectives if c.kind not in STARTED]
        for own, as_was in zip(made.actions, right.actions, strict=True)
    )
    return HARMLESS if same and alike else ESCAPED


def main(
    count: Annotated[int, typer.Option(help="Programs of each kind.", min=1)] = 5000,
    seed: Annotated[int, typer.Option(help="Of the faults.")] = 0,
) -> None:
    """Mutates Programs; exits with 1 where more than one of 200 is accepted and does harm."""
    console, start_s = Console(), time.perf_counter()
    kinds = {
        "messages and computes": of_orders,
        "collectives of one rank": lambda draw: of_collectives(draw, alike=False),
        "collectives of all dp ranks": lambda draw: of_collectives(draw, alike=True),
    }
    table = Table("mutated", REFUSED, HARMLESS, ESCAPED, "share")
    worst = 0.0
    for name, mutant in kinds.items():
        draw = random.Random(seed)
        found = Counter(mutant(draw) for _ in range(count))
        worst = max(worst, found[ESCAPED] / count)
        numbers = [f"{found[o]:,}" for o in (REFUSED, HARMLESS, ESCAPED)]
        table.add_row(name, *numbers, f"{found[ESCAPED] / count:.2%}")
    console.print(table)
    told = f"{3 * count:,} Programs, at most {worst:.2%} escape"
    told += f", {time.perf_counter() - start_s:.0f} s"
    finish(console, worst <= MOST_ESCAPES, told)


if __name__ == "__main__":
    typer.run(main)
