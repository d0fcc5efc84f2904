"""What moving optimizer state makes of a strategy, by pieces."""

from __future__ import annotations

from dataclasses import replace

import pytest

from merakc.costs.state import MIXED
from merakc.ir.state import UNSHARDED
from merakc.ir.strategy import Strategy
from merakc.machines.cluster import NOMINAL_CPU
from merakc.planner.estimate import estimate_job
from merakc.planner.host_estimate import (
    Priced,
    fetched,
    host_for,
    moved,
    moves_all,
    priced,
    without_state,
)
from merakc.planner.job import Job
from merakc.planner.piece_table import PieceTable
from merakc.planner.pricing import job_of
from tests.planner.test_piece_table import llama as record

HARDWARE = NOMINAL_CPU.described(1)


@pytest.fixture(scope="module")
def job() -> Job:
    table = PieceTable(record, NOMINAL_CPU)
    return job_of(table, Strategy(batch_size=4, micro_batches=4), HARDWARE, MIXED)


def _fit(job: Job) -> list[Priced]:
    return [(UNSHARDED, "none", estimate_job(job))]


def test_all_of_it_or_what_has_no_room(job: Job) -> None:
    host = host_for("auto", HARDWARE)
    assert host is not None
    assert host_for("activations", HARDWARE) is None
    assert (moves_all("optimizer"), moves_all("auto"), moves_all("optimizer, 1 GB")) == (
        True, False, False,
    )  # fmt: skip
    ((_, _, whole),), ((_, _, bare),) = _fit(job), _fit(without_state(job))
    state = 12 * job.rank_parameters[0]
    assert whole.peak_bytes[0] - bare.peak_bytes[0] == state
    ((_, _, all_),) = moved(_fit(without_state(job)), job, host, everything=True)
    assert all_.peak_bytes == bare.peak_bytes
    assert all_.step_s > whole.step_s
    small = replace(HARDWARE.nodes[0].device, memory_bytes=bare.peak_bytes[0] + state // 2)
    half = replace(job, places=[replace(place, device=small) for place in job.places])
    ((_, _, some),) = moved(_fit(without_state(half)), half, host, everything=False)
    assert small.memory_bytes - 12 < some.peak_bytes[0] <= small.memory_bytes
    assert whole.step_s < some.step_s < all_.step_s
    tiny = replace(host, memory_bytes=1)
    assert not list(moved(_fit(without_state(job)), job, tiny, everything=True))


def test_what_fits_moves_only_where_all_is_to_move(job: Job) -> None:
    assert priced("auto", job, HARDWARE, _fit)[1] == "none"
    assert priced("optimizer", job, HARDWARE, _fit)[1] == "optimizer"
    assert priced("none", job, HARDWARE, _fit)[1] == "none"
    lacking = priced("auto", job, HARDWARE, lambda one: None if one is job else _fit(one))
    assert lacking[1] == "optimizer"


def test_parameters_go_last_and_take_the_time_of_their_way(job: Job) -> None:
    def lacking(one: Job) -> list[Priced] | None:
        return None if one.framework.precision.parameter_bytes else _fit(one)

    found, kinds = priced("auto", job, HARDWARE, lacking)
    assert kinds == "optimizer, parameters"
    assert priced("optimizer", job, HARDWARE, lacking) == (None, "none")
    asked, named = priced("parameters", job, HARDWARE, _fit)
    assert named == kinds
    assert found is not None
    assert asked is not None
    ((_, _, estimate),), ((_, _, whole),) = asked, _fit(job)
    assert whole.peak_bytes[0] - estimate.peak_bytes[0] == 14 * job.rank_parameters[0]
    host = host_for("auto", HARDWARE)
    assert host is not None
    slow = replace(host, up_bytes_per_s=1.0)
    ((_, _, waiting),) = fetched(_fit(without_state(job, parameters=True)), job, slow)
    assert waiting.step_s >= 2 * 4 * 2 * job.rank_parameters[0]


def test_gradients_of_one_micro_batch_leave(job: Job) -> None:
    one = replace(job, strategy=replace(job.strategy, micro_batches=1))
    assert without_state(one).framework.precision.gradient_bytes == 0
    assert without_state(job).framework.precision.gradient_bytes == 2
