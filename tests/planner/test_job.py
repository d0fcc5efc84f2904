"""Pieces on stages: each is on one, and what stages share is told."""

from __future__ import annotations

import pytest

from merakc.costs.state import MIXED
from merakc.ir.state import StateShards
from merakc.ir.strategy import Strategy
from merakc.planner.job import Framework, make_job
from tests.planner.test_estimate import HARDWARE, PIECES, SHAPE


@pytest.mark.parametrize("stagewise", [False, True])
@pytest.mark.parametrize(
    ("pp", "chunks", "schedule"), [(1, 1, "1f1b"), (4, 1, "1f1b"), (2, 2, "zb-v")]
)
def test_every_piece_is_on_one_stage(pp: int, chunks: int, schedule: str, stagewise: bool) -> None:
    strategy = Strategy(pp=pp, chunks=chunks, micro_batches=8, schedule=schedule)
    job = make_job(PIECES, strategy, HARDWARE, Framework(stagewise=stagewise))
    assert [k for part in job.parts for k in part] == [*range(len(PIECES))]
    assert sorted(k for held in job.rank_pieces for k in held) == [*range(len(PIECES))]
    whole = make_job(PIECES, Strategy(), HARDWARE).stage_parameters
    # The table of words is at both ends, which are on one rank alone where stages go in a V.
    assert job.tied_parameters == (SHAPE.vocab * SHAPE.hidden_size if pp > 1 else 0)
    assert sum(job.stage_parameters) == sum(whole) + job.tied_parameters
    more = job.tied_parameters if chunks == 1 else 0
    assert sum(job.rank_parameters) == sum(whole) + more
    (held, *_) = job.state_bytes(StateShards(1, 1, 1))
    assert held == job.rank_parameters[0] * (
        MIXED.parameter_bytes + MIXED.gradient_bytes + MIXED.optimizer_bytes
    )
