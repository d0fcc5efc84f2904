"""How ranks begin."""

from __future__ import annotations

from functools import partial

import torch

from benchmarks.ranks import run_ranks
from merakc.machines.cluster import NOMINAL_CPU, Cluster
from merakc.train.starting import nominal, started

CPU = torch.device("cpu")


def begun() -> tuple[int, Cluster]:
    world, fuser = started(CPU, compile=False, timeout_s=20.0)
    assert fuser is None
    return world, nominal(CPU)


def test_ranks_begin_together_and_see_one_machine() -> None:
    found = run_ranks(2, partial(begun))
    assert [world for world, _ in found] == [2, 2]
    assert found[0][1] == found[1][1]
    assert 0 < found[0][1].memory_bytes < NOMINAL_CPU.memory_bytes * 100
