"""How large an arena is that has a place for all values of a rank's step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Final

from merakc.analysis.addresses import place
from merakc.analysis.lives import step_lives
from merakc.ir.report import RankMemory
from merakc.lowering.lowered import Lowered

# Of the forwards of a rank's step: placing what they and their backwards make takes two seconds.
MOST_CALLS: Final = 4_000


def with_arenas(memory: Iterable[RankMemory], lowered: Lowered) -> Iterator[RankMemory]:
    """Adds the arena of each pipeline rank, where its step does not have too many calls."""
    plan, mesh = lowered.plan, lowered.plan.mesh
    for own in memory:
        held = [s for s, rank in enumerate(plan.rank_of) if rank == own.rank]
        calls = sum(len(lowered.stages.local[s].nodes) for s in held)
        if calls * plan.micro_batches > MOST_CALLS:
            yield own
            continue
        rank = mesh.rank(0, own.rank, 0)
        (program,) = lowered.programs(ranks=[rank])
        found = place(step_lives(program, lowered.rank_graphs(rank)))
        yield replace(own, arena_bytes=found.size_bytes, bound_bytes=found.bound_bytes)
