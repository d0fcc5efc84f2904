from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from benchmarks.ranks import run_ranks
from merakc.runtime.links import (
    LINK_BYTES_PER_S,
    LINK_LATENCY_S,
    measure_link,
    measure_messages,
    measure_sharing,
    memory_bytes,
)

CPU = torch.device("cpu")


def test_links_are_measured_alike_on_every_rank() -> None:
    first, second = run_ranks(2, lambda: measure_link(CPU))
    assert first == second
    latency_s, bytes_per_s = first
    assert 0 < latency_s < 10
    assert 1e5 < bytes_per_s < 1e13


def test_messages_are_measured_between_neighbours() -> None:
    def of_rank() -> tuple[float, float]:
        group = dist.new_group([0, 1, 2])
        return measure_messages(CPU, group)

    found = run_ranks(3, of_rank)
    assert found[0] == found[1] == found[2]
    assert 0 < found[0][0] < 10
    assert 1e5 < found[0][1] < 1e13


def test_what_ranks_share_is_measured_alike_on_every_rank() -> None:
    found = run_ranks(3, measure_sharing)
    assert found[0] == found[1] == found[2]
    sharing = found[0]
    assert sharing is not None
    assert (sharing.devices, sharing.together[0]) == (3, 1.0)
    assert sharing.cores == min(3, len(os.sched_getaffinity(0)))
    assert all(0 < share <= 1 for share in sharing.together)


def test_one_rank_has_typical_links() -> None:
    assert measure_link(CPU) == (LINK_LATENCY_S, LINK_BYTES_PER_S)


def test_memory_is_shared_by_the_ranks_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    whole = memory_bytes(CPU)
    assert whole == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert memory_bytes(CPU) == whole // 4
