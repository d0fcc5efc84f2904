"""What runs on the ranks of experts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from merakc.errors import ShardError
from merakc.frontend.record import record
from merakc.ir.graph import Graph, InputKind, Node, Ref, TensorSpec
from merakc.ir.layout import parse_layout
from merakc.passes.sharding.experts.dispatch import rows_of_experts, uncut, without_rows
from merakc.passes.sharding.experts.loops import with_sorted_loops
from merakc.passes.sharding.sequences.gradient_sums import computed_whole
from merakc.passes.sharding.shard import shard
from merakc.passes.sharding.spmd import spmd_partition
from merakc.passes.sharding.spmd_ops import ATTENTION
from tests.passes.sharding.experts import looped
from tests.passes.sharding.experts.mixtures import (
    EXPERTS,
    H,
    Mixture,
    Part,
    S,
    ends_of,
    graph_of,
)


def _locals(ranks: int = 2, load: Sequence[float] = (), **parts: Part) -> list[Graph]:
    graph = graph_of(**parts)
    sharding = shard(graph, 1, cp=ranks, expert_parallel=True, expert_load=load)
    found = [spmd_partition(graph, sharding, rank) for rank in range(ranks)]
    for local in found:
        local.verify()
    return found


def test_rows_go_to_their_experts_and_back() -> None:
    ops: list[list[str]] = []
    for local, experts in zip(_locals(), (3, 2), strict=True):
        specs, (rows,) = local.specs(), rows_of_experts(local)
        assert specs[Ref("up")].shape[0] == specs[Ref("down")].shape[0] == experts
        assert EXPERTS == 5
        names = {n.name: n for n in local.nodes}
        inside = [n for n in local.nodes if n.outputs[0] and n.spec.shape[:1] == (rows,)]
        sent = [n for n in inside if n.op == "merakc.dispatch.default"]
        assert len(sent) == 2  # the rows, and each one's bias
        (back,) = [n for n in local.nodes if n.op == "merakc.combine.default"]
        assert names[back.args[0].node].op == "merakc.grouped_mm.default"
        ops.append([n.op for n in local.nodes])
    assert ops[0] == ops[1]


@pytest.mark.parametrize(
    ("samples", "attended"), [(4, (2, 1, 6, 4)), (3, (3, 1, 3, 4)), (1, (1, 1, 3, 4))]
)
def test_ranks_share_samples_that_divide_and_else_sequences(
    samples: int, attended: tuple[int, ...]
) -> None:
    ids = torch.zeros(samples, S, dtype=torch.long)
    graph = record(Mixture(), (ids, ids), {}).graph
    local = spmd_partition(graph, shard(graph, 1, cp=2, expert_parallel=True), 0)
    (attention,) = [n for n in local.nodes if n.op == ATTENTION]
    assert attention.outputs[0] == TensorSpec(attended, torch.float32)
    gathers = [n for n in local.nodes if n.op == "merakc.gather_to.default"]
    assert bool(gathers) == (samples % 2 > 0)  # keys and values


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"beside": lambda m: m.up.sum()}, "weights are read by aten.sum"),
        (
            {"up": lambda m: m.up + m.up.detach()},
            "made at .*test_dispatch.* of more than one parameter",
        ),
        ({"up": lambda m: m.up.flip(0)}, "or of those of other experts"),
        ({"up": lambda m: m.up.cumsum(0)}, "or of those of other experts"),
        (
            {"between": lambda m, made, ids: made.flip(0)},
            "sent: aten.flip.default at .* is not kno",
        ),
        (
            {"ends": lambda ids: ends_of(ids).clamp(max=3)},
            "sent: where the groups of merakc.grouped_mm.default at .* end is not known",
        ),
    ],
)
def test_experts_that_cannot_be_apart_are_refused(parts: Any, said: str) -> None:
    with pytest.raises(ShardError, match=said) as error:
        _locals(**parts)
    assert re.search("use ep=1", str(error.value))


def test_parameters_of_an_expert_are_whole_on_the_rank_that_has_it() -> None:
    graph = with_sorted_loops(looped.graph_of(looped.added))
    sharding = shard(graph, 1, cp=2, expert_parallel=True)
    splits = sharding.splits(graph)
    assert splits.keys() == {f"experts.{k}.{p}.weight" for k in range(5) for p in ("up", "down")}
    for k, home in enumerate((0, 0, 0, 1, 1)):
        assert str(splits[f"experts.{k}.up.weight"]) == f"{2 * H}@{home} x {H}"
    for rank in range(2):
        local = spmd_partition(graph, sharding, rank)
        local.verify()
        specs = local.specs()
        assert [specs[Ref(f"experts.{k}.down.weight")].shape[0] for k in range(5)] == [
            H * (home == rank) for home in (0, 0, 0, 1, 1)
        ]
        weights = [n for n in local.nodes if n.op == "merakc.grouped_mm.default"]
        assert [specs[n.args[1]].shape[0] for n in weights] == [(3, 2)[rank]] * 2


def test_tp_splits_the_hidden_units_of_a_ranks_experts() -> None:
    graph = graph_of()
    sharding = shard(graph, 3, cp=2, expert_parallel=True)
    splits = {name: str(layout) for name, layout in sharding.splits(graph).items()}
    assert (splits["up"], splits["down"]) == (
        f"5*2/3 x {H} x {2 * H}*3",
        f"5*2/3 x {2 * H}*3 x {H}",
    )
    over_tp = sharding.tp_splits(graph)
    assert str(over_tp["up"]) == f"5 x {H} x {2 * H}*"
    again = shard(graph, 3, over_tp, cp=2, expert_parallel=True)
    assert {name: str(layout) for name, layout in again.splits(graph).items()} == splits
    rows = set[frozenset[int]]()
    for lane in range(6):
        local = spmd_partition(graph, sharding, lane)
        local.verify()
        specs, names = local.specs(), {n.name: n for n in local.nodes}
        up = sharding.weight_layout(Ref("up")).local_shape(6, lane)
        assert specs[Ref("up")].shape == up == ((3, 2)[lane // 3], H, 2 * H // 3 + (lane % 3 < 2))
        (back,) = [n for n in local.nodes if n.op == "merakc.combine.default"]
        total = names[back.args[0].node]  # what comes back is of all hidden units
        assert (total.op, total.args[1:]) == ("merakc.all_reduce.default", ("tp", "sum"))
        sent = [n for n in local.nodes if n.op == "merakc.dispatch.default"]
        assert {specs[n.args[0]].shape[-1] for n in sent} == {H, up[2]}  # rows, and their biases
        rows.add(rows_of_experts(local))
    assert len(rows) == 1


def test_tp_splits_an_experts_own_parameters_where_they_are() -> None:
    graph = with_sorted_loops(looped.graph_of(looped.added))
    sharding = shard(graph, 2, cp=2, expert_parallel=True)
    splits = {name: str(layout) for name, layout in sharding.splits(graph).items()}
    for k, home in enumerate((0, 0, 0, 1, 1)):
        assert splits[f"experts.{k}.up.weight"] == f"{2 * H}*2 x {H}@{home}*2/2"
        assert splits[f"experts.{k}.down.weight"] == f"{H}@{home}*2/2 x {2 * H}*2"
    for lane in range(4):
        local = spmd_partition(graph, sharding, lane)
        local.verify()
        specs = local.specs()
        for k, home in enumerate((0, 0, 0, 1, 1)):
            here = H * (home == lane // 2)
            assert specs[Ref(f"experts.{k}.up.weight")].shape == (H, here)
            assert specs[Ref(f"experts.{k}.down.weight")].shape == (here, H)
        weights = [n for n in local.nodes if n.op == "merakc.grouped_mm.default"]
        assert {specs[n.args[1]].shape for n in weights} == {((3, 2)[lane // 2], H, H)}
        gone = {n.args[0] for n in local.nodes if n.op == "merakc.copy_to.default"}
        assert not any("experts" in ref.node and not specs[ref].numel for ref in gone)


def test_a_stack_of_what_is_computed_of_parameters_is_refused() -> None:
    up = torch.stack
    with pytest.raises(ShardError, match=r"made at .*test_dispatch.* of more than one param"):
        _locals(up=lambda m: up([*m.up.unbind(0)]))


def test_weights_are_gathered_in_one_order_on_all_ranks() -> None:
    """Where nothing can be sent. The order of a set would be another in each process."""
    graph = graph_of()
    weights = [i for i in graph.inputs if i.kind is InputKind.PARAMETER and i.spec.shape[1:]]
    splits = {i.target: f"{i.spec.shape[0]}* x {' x '.join(map(str, i.spec.shape[1:]))}"
              for i in weights}  # fmt: skip
    sharding = computed_whole(graph, 2, {n: parse_layout(text) for n, text in splits.items()})
    for rank in range(2):
        local = spmd_partition(graph, sharding, rank)
        local.verify()
        gathers = [n.args[0].node for n in local.nodes if n.op == "merakc.all_gather.default"]
        assert gathers == [i.name for i in weights]
        assert not any(n.op == "merakc.copy_to.default" for n in local.nodes)


def test_rows_are_those_of_the_rank_that_gets_most() -> None:
    (even,), (uneven,) = (
        rows_of_experts(_locals(load=load)[0]) for load in ((), (0.1, 0.1, 0.0, 0.2, 0.6))
    )
    assert 1.4 * even < uneven < 1.9 * even  # of four fifths in place of a half
    with pytest.raises(ShardError, match=r"the shares of 2 experts, and the mixture at .* has 5"):
        _locals(load=(0.5, 0.5))


def test_there_are_no_more_ranks_than_experts() -> None:
    with pytest.raises(ShardError, match="there are 5 experts"):
        _locals(6)


def test_what_depends_on_the_number_of_rows_is_refused() -> None:
    local = _locals()[0]
    (rows,) = rows_of_experts(local)
    assert without_rows(local) is local
    spec = TensorSpec((2 * rows,), torch.float32)
    more = Node("more", "aten.zeros.default", ((2 * rows,),), (), (spec,), source="here:1")
    with pytest.raises(ShardError, match=r"zeros\.default at here:1 depends on the number of rows"):
        without_rows(Graph(local.inputs, (*local.nodes, more), local.outputs, local.constants))


@pytest.mark.parametrize(("dim", "stands"), [(1, True), (-1, True), (0, False)])
def test_slices_of_sent_rows_have_gradients_of_any_number_of_rows(dim: int, stands: bool) -> None:
    local = _locals()[0]
    (rows,) = rows_of_experts(local)
    grad = next(n for n in local.nodes if n.outputs[0] and n.spec.shape == (rows, H))
    shape = (rows, 2 * H) if stands else (2 * rows, H)
    args = (Ref(grad.name), shape, dim, 0, 2**62, 2)
    node = Node(
        "more", "aten.slice_backward.default", args, (), (TensorSpec(shape, grad.spec.dtype),)
    )
    graph = local.with_nodes([*local.nodes, node])
    if not stands:
        with pytest.raises(ShardError, match="depends on the number of rows"):
            without_rows(graph)
        return
    made = without_rows(graph).nodes[-1]
    assert (made.op, made.args[1:3]) == ("merakc.unslice.default", (1, 2 * H))
    for count in (rows, 3, 0):
        given = torch.randn(count, H)
        whole = torch.ops.aten.slice_backward(given, (count, 2 * H), *args[2:])
        assert torch.equal(torch.ops.merakc.unslice(given, *made.args[1:]), whole)


def test_no_stage_ends_among_rows_that_were_sent() -> None:
    graph = graph_of()
    sharding = shard(graph, 1, cp=2, expert_parallel=True)
    position = {n.name: k for k, n in enumerate(graph.nodes)}
    marks = uncut(position, sharding)
    ((one,),) = [s.dispatched for s in sharding.context.sequences if s.dispatched]
    given = {ref.node for ref in (one.ends, *one.sorted_rows)}
    assert given - one.nodes
    assert len({marks[position[name]] for name in one.nodes | given}) == 1
    assert len(set(marks)) > len(marks) - 20
