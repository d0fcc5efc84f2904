"""How ranks begin."""

from __future__ import annotations

from functools import partial

import torch

from benchmarks.ranks import run_ranks
from merakc.machines.cluster import NOMINAL_CPU, Cluster
from merakc.machines.cluster_files import find_cluster
from merakc.train.starting import machines_for, started

CPU = torch.device("cpu")


def begun() -> tuple[int, Cluster]:
    world, fuser = started(CPU, compile=False, timeout_s=20.0)
    assert fuser is None
    return world, machines_for(None, CPU)


def test_ranks_begin_together_and_see_one_machine() -> None:
    found = run_ranks(2, partial(begun))
    assert [world for world, _ in found] == [2, 2]
    assert found[0][1] == found[1][1]
    assert 0 < found[0][1].memory_bytes < NOMINAL_CPU.memory_bytes * 100


def test_products_of_32_bits_are_priced_as_torch_is_told_to_make_them() -> None:
    given = find_cluster("a100-80").flat()
    assert machines_for(given, CPU) is given
    torch.set_float32_matmul_precision("high")
    try:
        rounded = machines_for(given, CPU).hardware
    finally:
        torch.set_float32_matmul_precision("highest")
    assert rounded == find_cluster("a100-80+tf32")
