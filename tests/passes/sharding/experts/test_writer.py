"""Rows that go to the ranks of their experts, as they are written."""

from __future__ import annotations

from merakc.passes.sharding.experts.loops import with_sorted_loops
from merakc.passes.sharding.experts.writer import ExpertWriter
from merakc.passes.sharding.shard import shard
from merakc.passes.sharding.spmd import SpmdPartitioner, spmd_partition
from tests.passes.sharding.experts import looped
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


def test_all_ranks_stack_with_nothing_of_what_others_have() -> None:
    graph = with_sorted_loops(looped.graph_of(looped.added))
    sharding, ops = shard(graph, 1, cp=2, expert_parallel=True), []
    for rank, experts in enumerate((3, 2)):
        local = spmd_partition(graph, sharding, rank)
        makers, specs = {n.name: n for n in local.nodes}, local.specs()
        stacks = [n for n in local.nodes if n.op == "aten.cat.default"]
        assert [n.spec.shape[0] for n in stacks] == [experts, experts]
        for stack in stacks:
            parts = [specs[ref].shape[0] for ref in stack.args[0]]
            assert parts == [k < 3 if rank == 0 else k >= 3 for k in range(5)]
            assert {makers[ref.node].op for ref in stack.args[0]} == {"aten.reshape.default"}
        ops.append([n.op for n in local.nodes])
    assert ops[0] == ops[1]
