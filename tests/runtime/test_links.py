from __future__ import annotations

import os

import pytest
import torch

from benchmarks.ranks import run_ranks
from merakc.runtime.links import (
    LINK_BYTES_PER_S,
    LINK_LATENCY_S,
    measure_link,
    memory_bytes,
)

CPU = torch.device("cpu")


def test_links_are_measured_alike_on_every_rank() -> None:
    first, second = run_ranks(2, lambda: measure_link(CPU))
    assert first == second
    latency_s, bytes_per_s = first
    assert 0 < latency_s < 10
    assert 1e5 < bytes_per_s < 1e13


def test_one_rank_has_typical_links() -> None:
    assert measure_link(CPU) == (LINK_LATENCY_S, LINK_BYTES_PER_S)


def test_memory_is_shared_by_the_ranks_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    whole = memory_bytes(CPU)
    assert whole == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert memory_bytes(CPU) == whole // 4
