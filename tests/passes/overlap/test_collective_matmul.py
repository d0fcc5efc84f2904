"""Products and collectives in chunks of rows: the same loss and gradients, sooner."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from benchmarks.models import MODELS
from benchmarks.zoo_models import ZOO
from merakc.costs.device import place_on
from merakc.costs.nodes import graph_seconds
from merakc.equality.casts import lifted_casts
from merakc.ir.graph import Graph, Input, InputKind, Node, Output, OutputKind, Ref, TensorSpec
from merakc.ir.program import Mesh, StageGraphs
from merakc.ir.strategy import Strategy
from merakc.lowering.lowered import Lowered, make_plan
from merakc.machines.cluster import Cluster
from merakc.passes.overlap.async_collectives import overlapped
from merakc.passes.overlap.chunk_writer import COLLECTIVES
from merakc.passes.overlap.collective_matmul import RowChunks, chunk_rows
from merakc.passes.pipeline import differentiate
from merakc.runtime.codegen import compile_graph
from tests.passes.lockstep import in_lockstep, relative_error
from tests.recorded import recorded

BOUND = 1e-10
# Collectives take about half as long as the rest of these models; nothing waits but for bytes.
CLUSTER = Cluster("a link", 1e7, 1e8, 1e-9, 1 << 33, 0.0, 1.5e5)
LINK = place_on(CLUSTER, 2)
CPU = torch.device("cpu")


@cache
def lowered(name: str, tp: int, samples: int, *, sequence_parallel: bool) -> Lowered:
    case = (MODELS | ZOO)[name]
    with lifted_casts():
        model = case.model(torch.float64, dropout=0.2)
        recording = recorded(model, case.batch(samples, torch.float64))
    mesh = Mesh(1, tp, 1)
    return make_plan(
        recording,
        Strategy().on(mesh, micro_batches=1, sequence_parallel=sequence_parallel),
        CLUSTER,
    )


@cache
def whole(name: str, tp: int, samples: int, rank: int, *, sequence_parallel: bool) -> StageGraphs:
    made = lowered(name, tp, samples, sequence_parallel=sequence_parallel)
    return differentiate(made.local(0, rank))


def all_in(local: Graph, count: int) -> dict[str, int]:
    """Every product that can be, in so many chunks."""
    return {weight: count for kind in RowChunks(local).kinds(count) for weight in kind}


def run(graph: Graph, given: Mapping[str, Tensor]) -> list[Tensor]:
    values = {**graph.constants, **given}
    return compile_graph(graph, CPU)([values[i.name] for i in graph.inputs])


def results(made: StageGraphs, rank: int) -> dict[str, Tensor]:
    """What a forward and a backward on random values give."""
    pick = torch.Generator().manual_seed(rank)

    def value(item: Input) -> Tensor:
        if item.spec.dtype.is_floating_point:
            return torch.rand(item.spec.shape, generator=pick, dtype=torch.float64) - 0.5
        words = torch.Generator().manual_seed(7)  # all ranks have the same
        found = torch.randint(0, 2, item.spec.shape, generator=words, dtype=item.spec.dtype)
        if found.dim():
            found[..., 0] = 1  # the first word is not masked
        return found

    forward, backward = made.forward, made.backward
    assert backward is not None
    given = {i.name: value(i) for i in forward.inputs if i.name not in forward.constants}
    values = dict(zip((o.name for o in forward.outputs), run(forward, given), strict=True))
    given |= {i.name: values[i.target] for i in backward.inputs if i.kind is InputKind.SAVED}
    tangents = (i for i in backward.inputs if i.kind is InputKind.TANGENT)
    given |= {i.name: torch.ones(i.spec.shape, dtype=i.spec.dtype) for i in tangents}
    found = {o.name: values[o.name] for o in forward.outputs if o.kind is not OutputKind.SAVED}
    gradients = zip(backward.outputs, run(backward, given), strict=True)
    return found | {f"gradient of {out.name}": gradient for out, gradient in gradients}


def assert_equal_steps(name: str, tp: int, samples: int, chunks: dict[str, int], sp: bool) -> None:
    plain = [whole(name, tp, samples, rank, sequence_parallel=sp) for rank in range(tp)]
    plan = lowered(name, tp, samples, sequence_parallel=sp)
    plan = replace(plan, plan=replace(plan.plan, row_chunks=chunks))
    locals_ = [plan.local(0, rank) for rank in range(tp)]
    assert any("#" in node.name for node in locals_[0].nodes)
    moved = [overlapped(differentiate(local), LINK) for local in locals_]

    def both(rank: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        return results(plain[rank], rank), results(moved[rank], rank)

    for wanted, found in in_lockstep(tp, both):
        assert found.keys() == wanted.keys()
        worst = max(relative_error(found[key], wanted[key]) for key in wanted)
        assert worst < BOUND


SAME = [(n, tp, s) for n, tp in (("llama", 2), ("t5", 2), ("bert", 2)) for s in (False, True)]


@pytest.mark.parametrize(
    ("name", "tp", "sequence_parallel"), [*SAME, ("vit", 2, False), ("nn_transformer", 2, False)]
)
def test_one_sample_in_chunks_gives_the_same_step(
    name: str, tp: int, sequence_parallel: bool
) -> None:
    local = lowered(name, tp, 1, sequence_parallel=sequence_parallel).local(0, 0)
    assert_equal_steps(name, tp, 1, all_in(local, 2), sequence_parallel)


@pytest.mark.parametrize("seed", range(4))
def test_any_products_in_any_chunks_give_the_same_step(seed: int) -> None:
    pick = random.Random(seed)
    name = pick.choice(["llama", "gpt2", "phi3", "whisper", "gpt_neox"])
    samples, sp = pick.choice([1, 2, 3]), pick.random() < 0.5
    local = lowered(name, 2, samples, sequence_parallel=sp).local(0, 0)
    weights = sorted(all_in(local, 2))
    chosen = pick.sample(weights, pick.randint(1, len(weights)))
    chunks = {weight: pick.choice([2, 3, 5]) for weight in chosen}
    assert_equal_steps(name, 2, samples, chunks, sp)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_collectives_beside_products_move_the_same_bytes_in_chunks(
    sequence_parallel: bool,
) -> None:
    local = lowered("llama", 2, 1, sequence_parallel=sequence_parallel).local(0, 0)
    made = chunk_rows(local, all_in(local, 3))

    def moved(graph: Graph) -> Counter[str]:
        found: Counter[str] = Counter()
        for node in graph.nodes:
            if node.op in COLLECTIVES:
                found[node.op] += node.spec.size_bytes
        return found

    assert moved(made) == moved(local)
    inputs = {i.name for i in made.inputs}  # weights of norms
    left = [n.name for n in made.nodes if n.op in COLLECTIVES and n.refs[0].node not in inputs]
    assert [name for name in left if "#" not in name] == ["embedding.scatter1"] * sequence_parallel


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("piece", ["forward", "backward"])
def test_one_sample_hides_its_communication(piece: str, sequence_parallel: bool) -> None:
    plan = lowered("llama", 2, 1, sequence_parallel=sequence_parallel)
    local = plan.local(0, 0)
    plain = whole("llama", 2, 1, 0, sequence_parallel=sequence_parallel)
    moved = differentiate(chunk_rows(local, all_in(local, 2)))
    blocking_s, ordered_s, chunked_s = (
        graph_seconds(getattr(chunk, piece), LINK)
        for chunk in (plain, overlapped(plain, LINK), overlapped(moved, LINK))
    )
    assert chunked_s < 0.97 * ordered_s
    assert chunked_s < 0.85 * blocking_s


def test_sequences_that_do_not_divide_over_ranks_stay_whole() -> None:
    local = lowered("vit", 2, 1, sequence_parallel=True).local(0, 0)  # 17 patches
    assert RowChunks(local).kinds(2) == ()


def test_ranks_with_other_nodes_in_their_chunks_stay_whole() -> None:
    local = lowered("llama", 2, 1, sequence_parallel=False).local(0, 0)
    other = lowered("gpt2", 2, 1, sequence_parallel=False).local(0, 0)
    chunks = all_in(local, 2)
    assert chunk_rows(local, chunks, (local, local)) != local
    assert chunk_rows(local, chunks, (local, other)) is local


FLOATS = torch.float64
X, W = TensorSpec((1, 6, 4), FLOATS), TensorSpec((4, 4), FLOATS)


def two_layers() -> Graph:
    """A product and its sum, an activation, another product and its sum."""

    def node(name: str, op: str, *args: object) -> Node:
        return Node(name, op, args, (), (X,))

    linear, total = "aten.linear.default", "merakc.all_reduce.default"
    return Graph(
        (
            Input("x", InputKind.ACTIVATION, X, requires_grad=True),
            Input("v", InputKind.PARAMETER, W, "first", requires_grad=True),
            Input("w", InputKind.PARAMETER, W, "second", requires_grad=True),
        ),
        (
            node("a", linear, Ref("x"), Ref("v")),
            node("a.sum", total, Ref("a"), "tp", "sum"),
            node("b", "aten.relu.default", Ref("a.sum")),
            node("c", linear, Ref("b"), Ref("w")),
            node("c.sum", total, Ref("c"), "tp", "sum"),
            node("d", "aten.relu.default", Ref("c.sum")),
        ),
        (Output("d", OutputKind.ACTIVATION, Ref("d")),),
    )


def test_what_lies_between_products_in_chunks_is_in_chunks_too() -> None:
    made = chunk_rows(two_layers(), {"first": 2, "second": 2})
    chunks = [f"{name}#{j}" for j in (0, 1) for name in ("a", "a.sum", "b", "c", "c.sum")]
    assert [n.name for n in made.nodes] == ["x.0#cut0", *chunks, "c.sum.0#joined", "d"]


def test_a_product_that_stays_whole_parts_what_is_in_chunks() -> None:
    made = chunk_rows(two_layers(), {"first": 2})
    assert [n.name for n in made.nodes] == [
        "x.0#cut0", "a#0", "a.sum#0", "a#1", "a.sum#1", "a.sum.0#joined", "b", "c", "c.sum", "d",
    ]  # fmt: skip
    apart = chunk_rows(two_layers(), {"first": 2, "second": 3})
    assert "b" in [n.name for n in apart.nodes]
    assert [n.spec.shape[1] for n in apart.nodes if n.name.startswith("c#")] == [2, 2, 2]


def test_products_without_collectives_or_rows_stay_whole() -> None:
    graph = two_layers()
    assert chunk_rows(graph, {"first": 7}) is graph  # of 6 rows
    assert chunk_rows(graph, {"third": 2}) is graph
    nodes = tuple(
        replace(n, op="aten.neg.default", args=n.args[:1]) if n.op in COLLECTIVES else n
        for n in graph.nodes
    )
    alone = replace(graph, nodes=nodes)
    assert chunk_rows(alone, {"first": 2, "second": 2}) is alone
    assert RowChunks(alone).kinds(2) == ()
