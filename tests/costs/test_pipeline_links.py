"""Which messages of a pipeline go from node to node."""

from __future__ import annotations

from dataclasses import replace

import pytest

from merakc.cli.clusters import machines
from merakc.costs.pipeline_links import crossing, pipeline_links
from merakc.ir.program import Mesh
from merakc.machines.cluster import NOMINAL_GPU


@pytest.mark.parametrize(
    ("mesh", "per_node", "pairs"),
    [
        (Mesh(pp=4), 4, ()),
        (Mesh(tp=2, pp=4), 4, ((0, 2), (0, 3), (1, 2), (1, 3))),
        (Mesh(tp=4, pp=2), 4, ((0, 1),)),
        (Mesh(dp=4, pp=2, inner="dp"), 4, ((0, 1),)),
        (Mesh(dp=2, pp=2, inner="dp"), 4, ()),
        (Mesh(dp=2, pp=3), 4, ((0, 1), (0, 2))),  # of the second replica, on ranks 3, 4 and 5
        (Mesh(pp=3), 1, ((0, 1), (0, 2), (1, 2))),
    ],
    ids=str,
)
def test_pairs(mesh: Mesh, per_node: int, pairs: tuple[tuple[int, int], ...]) -> None:
    found = crossing(mesh, per_node)
    assert found == {*pairs, *((b, a) for a, b in pairs)}
    every = {
        (a, b)
        for dp in range(mesh.dp) for tp in range(mesh.tp)
        for a in range(mesh.pp) for b in range(mesh.pp)
        if mesh.rank(dp, a, tp) // per_node != mesh.rank(dp, b, tp) // per_node
    }  # fmt: skip
    assert found == every


def test_links_of_a_cluster() -> None:
    cluster = machines("h100", "bfloat16", 16)
    found = pipeline_links(Mesh(tp=4, pp=4), cluster)
    assert found.between(0, 1) == found.between(2, 3) == found.near
    assert found.between(1, 2) == found.far
    assert found.near.bytes_per_s > 5 * found.far.bytes_per_s
    alone = replace(NOMINAL_GPU, hardware=None)
    one = pipeline_links(Mesh(pp=4), alone)
    assert one.near == one.far == (alone.link_latency_s, alone.link_bytes_per_s)
