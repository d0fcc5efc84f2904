"""A cluster is a value: equal by what it says, and no one changes it."""

from __future__ import annotations

import dataclasses

import pytest

from merakc.cluster import Cluster

CLUSTER = Cluster("two cores", 1e11, 2e10, 5e-6, 8 << 30, 1e-4, 1.25e8)


def test_a_cluster_is_a_value() -> None:
    same = dataclasses.replace(CLUSTER)
    assert same == CLUSTER
    assert hash(same) == hash(CLUSTER)
    assert dataclasses.replace(CLUSTER, memory_bytes=1) != CLUSTER
    with pytest.raises(dataclasses.FrozenInstanceError):
        CLUSTER.memory_bytes = 1  # type: ignore[misc]
