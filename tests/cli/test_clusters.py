"""Machines by name: nominal ones, presets and files, and too few of them."""

from __future__ import annotations

import re

import pytest

from merakc.cli.clusters import is_built_in, machines
from merakc.errors import ClusterError
from merakc.machines.cluster import NOMINAL_CPU


def test_machines_by_name() -> None:
    assert machines("cpu", "float32", 4096) == NOMINAL_CPU
    half, single = (machines("a100-80:2", dtype, 16) for dtype in ("bfloat16", "float32"))
    assert half.flops_per_s > single.flops_per_s
    assert half.hardware is not None
    assert machines("gpu+tf32", "float32") == machines("gpu", "float32")
    assert is_built_in("gpu+tf32")  # so that a plan's own machines are found again


def test_a_preset_has_as_many_nodes_as_the_ranks_take() -> None:
    found = machines("h100", "bfloat16", 64).hardware
    assert found is not None
    assert len(found.devices) == 64


def test_what_is_none_or_too_few_is_refused() -> None:
    with pytest.raises(ClusterError, match="h100:2: 64 ranks are asked for and it has 16 devices"):
        machines("h100:2", "bfloat16", 64)
    with pytest.raises(
        ClusterError, match="give the path of a TOML file, or one of cpu, gpu, a100"
    ):
        machines("moon", "bfloat16", 1)


@pytest.mark.parametrize(
    ("name", "meant"),
    [("H100", "h100"), ("h10:4", "h100:4"), ("h100+tf33", "h100+tf32"), ("gpu:2", "gpu"),
     ("GPU+tf", "gpu+tf32"), ("a10080", "a100-80")],
)  # fmt: skip
def test_a_name_that_is_nearly_one_is_named(name: str, meant: str) -> None:
    with pytest.raises(ClusterError, match=re.escape(f"(did you mean {meant!r}?)")):
        machines(name, "bfloat16", 1)
