"""Graphs with their collectives in starts and waits: the same values, in a better order."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.models import MODELS
from merakc.costs.device import place_on
from merakc.costs.nodes import graph_seconds, pipelined, ring_backward
from merakc.costs.work.flops import COLLECTIVES
from merakc.equality.casts import lifted_casts
from merakc.frontend.record import record
from merakc.ir.graph import Graph, Input, InputKind, Node, Output, OutputKind, Ref, TensorSpec
from merakc.ir.program import Mesh, StageGraphs
from merakc.ir.strategy import Strategy
from merakc.kernels.ops import STARTED, WAIT
from merakc.kernels.ring.attention import RING
from merakc.lowering.lowered import Lowered, make_plan
from merakc.machines.cluster import NOMINAL_CPU, NOMINAL_GPU, Cluster
from merakc.passes.autodiff.interpret import interpret
from merakc.passes.autodiff.recompute import checkpointed, selective
from merakc.passes.autodiff.split_backward import split_backward
from merakc.passes.forward.scores import BLOCKWISE, without_scores
from merakc.passes.overlap.async_collectives import (
    PIECES,
    SLOWDOWN,
    _stage_tasks,
    least_share,
    overlap,
    overlapped,
    same_nodes,
    stage_seconds,
    written,
)
from merakc.passes.pipeline import differentiate
from merakc.passes.sharding.sequences import rings
from merakc.passes.sharding.shard import shard
from merakc.passes.sharding.spmd import spmd_partition
from tests.passes.forward.test_scores import Head
from tests.passes.lockstep import in_lockstep
from tests.passes.sharding.sequences.test_rings import _graph

SPEC = TensorSpec((64, 64), torch.float64)
# The sums of `SPEC` take 7 ms, a product 10 us.
CLUSTER = replace(NOMINAL_CPU, link_bytes_per_s=5e6)
SLOW = place_on(CLUSTER, 2)
REDUCE, MM, NEG = "merakc.all_reduce.default", "aten.mm.default", "aten.neg.default"


def node(name: str, op: str, *args: Any) -> Node:
    return Node(name, op, (*args, "tp", "sum") if op == REDUCE else args, (), (SPEC,))


def graph(nodes: tuple[Node, ...], *outputs: str) -> Graph:
    made = Graph(
        (Input("x", InputKind.BATCH, SPEC),),
        nodes,
        tuple(Output(name, OutputKind.RESULT, Ref(name)) for name in outputs),
    )
    made.verify()
    return made


def names(made: Graph) -> list[str]:
    return [n.name + "?" * (n.op == WAIT) for n in made.nodes]


SUMMED = graph(
    (
        node("a", NEG, Ref("x")),
        node("sum", REDUCE, Ref("a")),
        node("b", MM, Ref("sum"), Ref("x")),
        node("side", MM, Ref("a"), Ref("a")),
    ),
    "b",
    "side",
)


def test_what_does_not_read_a_sum_moves_under_it() -> None:
    assert names(overlap(SUMMED, SLOW)) == ["a", "sum.start", "side", "sum?", "b"]


def test_what_is_made_again_hides_nothing() -> None:
    nodes = (
        node("a", NEG, Ref("x")),
        node("sum", REDUCE, Ref("x")),
        node("side", MM, Ref("x"), Ref("x")),
        node("b", MM, Ref("a"), Ref("sum")),
    )
    forward = graph(nodes, "b", "side")
    assert names(overlap(forward, SLOW)) == ["sum.start", "a", "side", "sum?", "b"]
    backward = replace(forward, inputs=(Input("x", InputKind.SAVED, SPEC),))
    assert names(overlap(backward, SLOW)) == ["sum.start", "side", "a", "sum?", "b"]


def test_a_sum_that_is_waited_for_at_once_blocks() -> None:
    assert names(written(SUMMED, ("a", "sum", "b", "side"))) == ["a", "sum", "b", "side"]


def test_a_sum_that_only_leaves_the_graph_is_waited_for_at_its_end() -> None:
    nodes = (*SUMMED.nodes[:2], SUMMED.nodes[3])
    made = overlap(graph(nodes, "sum", "side"), SLOW)
    assert names(made) == ["a", "sum.start", "side", "sum?"]
    made.verify()


def test_a_graph_without_collectives_stays_as_it_is() -> None:
    plain = graph((node("a", NEG, Ref("x")),), "a")
    assert overlap(plain, SLOW) is plain


@cache
def lowered(name: str, tp: int, samples: int = 2) -> Lowered:
    with lifted_casts():
        case = MODELS[name]
        recording = record(case.model(torch.float64), (), case.batch(samples, torch.float64))
    return make_plan(recording, Strategy().on(Mesh(1, tp, 1), micro_batches=1), CLUSTER)


@cache
def chunk(name: str, tp: int, rank: int) -> StageGraphs:
    made = differentiate(lowered(name, tp).local(0, rank))
    input_grad, weight_grad = split_backward(made)
    made = replace(made, input_grad=input_grad, weight_grad=weight_grad)
    return checkpointed(made, selective(made))


def run_step(made: StageGraphs, rank: int) -> dict[str, Tensor]:
    """Every output of a forward and a backward on random values."""
    pick = torch.Generator().manual_seed(rank)

    def value(item: Input) -> Tensor:
        if item.spec.dtype.is_floating_point:
            return torch.rand(item.spec.shape, generator=pick, dtype=torch.float64) - 0.5
        return torch.zeros(item.spec.shape, dtype=item.spec.dtype)

    given = {i.name: value(i) for i in made.forward.inputs if i.name not in made.forward.constants}
    found = dict(zip([o.name for o in made.forward.outputs], interpret(made.forward, given),
                     strict=True))  # fmt: skip
    assert made.backward is not None
    for item in made.backward.inputs:
        if item.kind is InputKind.SAVED:
            given[item.name] = found[item.target]
        elif item.kind is InputKind.TANGENT:
            given[item.name] = torch.ones(item.spec.shape, dtype=item.spec.dtype)
    outputs = (f"gradient of {o.name}" for o in made.backward.outputs)
    return found | dict(zip(outputs, interpret(made.backward, given), strict=True))


@pytest.mark.parametrize(("name", "tp"), [("llama", 2), ("gpt2", 2), ("t5", 2), ("gpt_neox", 4)])
def test_no_bit_changes(name: str, tp: int) -> None:
    chunks = [chunk(name, tp, rank) for rank in range(tp)]
    assert all(same_nodes(chunks[0], c) for c in chunks)

    def both(rank: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        moved = overlapped(chunks[rank], SLOW, chunks[0])
        return run_step(chunks[rank], rank), run_step(moved, rank)

    for plain, moved in in_lockstep(tp, both):
        assert plain.keys() == moved.keys()
        assert all(torch.equal(plain[key], moved[key]) for key in plain)


def started(made: Graph) -> list[str]:
    return [n.name for n in made.nodes if n.op in COLLECTIVES or n.op in STARTED]


def test_ranks_with_parts_of_other_sizes_start_collectives_in_one_order() -> None:
    plan = lowered("gpt2", 2)  # 131 words over 2 ranks
    assert plan.stages.sharding.unlike_lanes(plan.stages.graphs[0]) == (0, 1)
    plan = replace(plan, plan=replace(plan.plan, sub_batches=(1,), machines=CLUSTER))
    first, second = (plan.stage_graphs(0, rank) for rank in range(2))
    for piece in ("forward", "backward"):
        one, other = getattr(first, piece), getattr(second, piece)
        assert [n.name for n in one.nodes] == [n.name for n in other.nodes]
        assert any(n.op in STARTED for n in one.nodes)


def test_chunks_of_other_nodes_are_told_apart() -> None:
    assert not same_nodes(chunk("llama", 2, 0), chunk("gpt2", 2, 0))


@pytest.mark.parametrize("piece", PIECES)
def test_every_graph_of_a_chunk_keeps_its_nodes_and_gets_no_slower(piece: str) -> None:
    plain = chunk("llama", 2, 0)
    before, after = getattr(plain, piece), getattr(overlapped(plain, SLOW), piece)
    assert {n.name for n in after.nodes} - {f"{n.name}.start" for n in before.nodes} == {
        n.name for n in before.nodes
    }
    for out in before.outputs:
        assert out in after.outputs
    assert (
        graph_seconds(after, SLOW)
        <= graph_seconds(before, SLOW) * (1 + 1e-6) + len(started(before)) * SLOW.device.launch_s
    )


def test_weight_gradients_hide_sums_of_a_backward() -> None:
    plain = chunk("llama", 2, 0)
    assert plain.backward is not None
    machines = place_on(Cluster("balanced", 1e7, 1e8, 1e-6, 1 << 33, 1e-5, 5e5), 2)
    total_s = graph_seconds(plain.backward, machines)
    made = overlap(plain.backward, machines)
    assert graph_seconds(made, machines) < 0.9 * total_s


def test_rough_seconds_of_a_stage_shrink_where_it_has_something_to_hide() -> None:
    plan = lowered("llama", 2)
    overlapped_s, blocking_s = stage_seconds(plan.stages.local[0], SLOW)
    assert overlapped_s < blocking_s
    alone = lowered("llama", 1)
    first, second = stage_seconds(alone.stages.local[0], SLOW)
    assert first == second


def test_a_loss_in_blocks_is_of_several_kernels() -> None:
    head, labels = Head(""), torch.zeros(2, 3, dtype=torch.long)
    local = without_scores(record(head, (torch.randn(2, 3, 4), labels), {}).graph, 0)
    assert any(n.op == BLOCKWISE for n in local.nodes)
    place = place_on(replace(NOMINAL_GPU, symmetric_memory=True), 2)
    assert least_share(local, place) == 1  # it hides nothing, and is no fused product


def test_the_backward_of_a_ring_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rings, "RING_PRICE", 1e-9)
    graph = _graph()
    local = spmd_partition(graph, shard(graph, 1, cp=2), 0)
    (node,) = (n for n in local.nodes if n.op == RING)
    specs = local.specs()
    for made, tasks in zip(
        (node, ring_backward(node, specs)), _stage_tasks(local, SLOW), strict=True
    ):
        (own,) = (task for task in tasks if task.holds_link)
        found = pipelined(made, specs, SLOW)
        assert own.name == node.name
        assert own.compute_s == pytest.approx(found.seconds + (SLOWDOWN - 1) * found.hidden_s)
