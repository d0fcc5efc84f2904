"""What is said where nothing fits: it is true, by the planner's own figures."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest

from merakc.errors import FitError
from merakc.ir.program import Mesh
from merakc.machines.cluster import NOMINAL_CPU, Cluster
from merakc.planner import fit
from merakc.planner.choose import compare, state_precision
from merakc.planner.fit import Fit, find_least, fit_error
from merakc.planner.piece_table import PieceTable
from merakc.planner.request import Request
from tests.planner.test_piece_table import llama as record

WHOLE = Request(1, 0, total_batch_size=16)


def with_bytes(memory_bytes: int) -> Cluster:
    return replace(NOMINAL_CPU, memory_bytes=memory_bytes)


KNOWN: dict[str, int] = {}  # most tests ask of the same requests


def least_bytes(request: Request) -> int:
    if str(request) not in KNOWN:
        KNOWN[str(request)] = _least_bytes(request)
    return KNOWN[str(request)]


def _least_bytes(request: Request) -> int:
    table = PieceTable(record, NOMINAL_CPU)
    precision = state_precision(record, request)
    hardware = NOMINAL_CPU.described(request.world_size)
    found = find_least(table, request, hardware, precision)
    assert found is not None
    assert found.state_bytes < found.need_bytes
    return found.need_bytes


@pytest.mark.parametrize("request_", [WHOLE, replace(WHOLE, world_size=4)], ids=["one", "four"])
def test_nothing_fits_less_and_something_fits_that(request_: Request) -> None:
    need = least_bytes(request_)
    assert compare(request_, record, with_bytes(need)).ranked
    assert not compare(request_, record, with_bytes(need * 9 // 10)).ranked


@pytest.mark.parametrize(
    ("fixed", "name"),
    [
        ({"recompute": "none"}, "recompute"),
        ({"micro_batches": 1}, "micro_batches"),
        ({"dp": 4, "state_shards": "zero-0"}, "state_shards"),
        ({"dp": 4}, "the degrees"),
    ],
)
def test_what_stands_in_the_way_is_named(fixed: dict[str, Any], name: str) -> None:
    free = replace(WHOLE, world_size=4)
    opened = {"state_shards": {"dp": 4}}.get(name, {})
    limit = with_bytes(least_bytes(replace(free, **opened)) + 1)
    asked = replace(free, **fixed)
    assert not compare(asked, record, limit).ranked
    assert f"with {name} left open it fits: dp=" in str(fit_error(asked, record, limit))


def test_as_many_devices_as_are_said_would_do() -> None:
    limit = with_bytes(least_bytes(WHOLE) // 2)
    told = str(fit_error(WHOLE, record, limit))
    match = re.search(r"needs (.*) at the least, .* (\d+) such devices would do", told)
    assert match is not None
    ranks, opened = int(match[2]), replace(WHOLE, offload="auto")
    assert compare(replace(opened, world_size=ranks), record, limit).ranked
    assert not compare(replace(opened, world_size=ranks // 2), record, limit).ranked
    with patch.object(fit, "MOST_TIMES", 4):
        told = str(fit_error(WHOLE, record, with_bytes(10)))
    assert "4 such devices would not do (nor would more)" in told
    with patch.object(fit, "LOOKING_S", 0.01):
        told = str(fit_error(WHOLE, record, with_bytes(10)))
    assert "such devices would not do (more were not looked at)" in told


@patch.object(fit, "MOST_TIMES", 2)  # as 100 bytes are too few for any number
def test_ranks_that_share_their_memory_may_need_more_than_others() -> None:
    mesh = Mesh(pp=2)
    one = Fit(WHOLE, record, with_bytes(100), shared=True)
    one.check((150, 40), mesh)
    own = replace(one, shared=False)
    own.check((120, 40), mesh, rough=True)
    for peaks, rough in (((101, 40), False), ((126, 0), True)):
        with pytest.raises(FitError, match=r"a rank needs 1\d\d B and has 100 B"):
            own.check(peaks, mesh, rough=rough)
