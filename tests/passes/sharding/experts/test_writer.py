"""Rows that go to the ranks of their experts, as they are written."""

from __future__ import annotations

from merakc.passes.sharding.experts.writer import ExpertWriter
from merakc.passes.sharding.shard import shard
from merakc.passes.sharding.spmd import SpmdPartitioner, spmd_partition
from tests.passes.sharding.experts.mixtures import graph_of


def test_ends_are_told_once_and_rows_come_back_over_the_same_axis() -> None:
    assert issubclass(SpmdPartitioner, ExpertWriter)
    graph = graph_of()
    local = spmd_partition(graph, shard(graph, 1, cp=2, expert_parallel=True), 1)
    sent = [n for n in local.nodes if n.op == "merakc.dispatch.default"]
    (back,) = [n for n in local.nodes if n.op == "merakc.combine.default"]
    (told,) = [n for n in local.nodes if n.name.endswith(".all_gather0")]
    assert {n.args[1] for n in (*sent, back)} == {sent[0].args[1]} == {told.outs[0]}
    assert {n.args[2] for n in (*sent, back)} == {"cp"}
