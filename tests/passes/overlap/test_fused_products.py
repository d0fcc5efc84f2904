"""Products in one op with the collective beside them: the same loss and gradients."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from merakc.costs.device import place_on
from merakc.costs.nodes import pipelined
from merakc.costs.work.flops import PIPELINED, graph_flops
from merakc.ir.graph import Graph, Input, InputKind, Node, Output, OutputKind, Ref, TensorSpec
from merakc.machines.cluster import NOMINAL_GPU, Cluster
from merakc.passes.autodiff.recompute import checkpointed, selective, within_bytes
from merakc.passes.overlap.async_collectives import graph_tasks, overlapped, stage_seconds
from merakc.passes.overlap.fused_products import (
    GATHER,
    GATHER_MATMUL,
    MATMUL_SCATTER,
    SCATTER,
    FusedProducts,
    fuse_products,
)
from merakc.passes.pipeline import differentiate
from tests.passes.lockstep import in_lockstep, relative_error
from tests.passes.overlap.test_collective_matmul import LINK, lowered, results, whole

BOUND = 1e-9


def everything(local: Graph) -> list[str]:
    """The weights of all products that can be fused."""
    return sorted(frozenset().union(*FusedProducts(local).kinds()))


def assert_equal_steps(name: str, tp: int, samples: int, weights: Collection[str]) -> None:
    plain = [whole(name, tp, samples, rank, sequence_parallel=True) for rank in range(tp)]
    plan = lowered(name, tp, samples, sequence_parallel=True)
    plan = replace(plan, plan=replace(plan.plan, fused_products=tuple(weights)))
    locals_ = [plan.local(0, rank) for rank in range(tp)]
    ops = {node.op for node in locals_[0].nodes}
    assert ops & {GATHER_MATMUL, MATMUL_SCATTER}
    fused = [overlapped(differentiate(local), LINK) for local in locals_]

    def both(rank: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        return results(plain[rank], rank), results(fused[rank], rank)

    for wanted, found in in_lockstep(tp, both):
        assert found.keys() == wanted.keys()
        worst = max(relative_error(found[key], wanted[key]) for key in wanted)
        assert worst < BOUND


@pytest.mark.parametrize(
    ("name", "tp", "samples"),
    [("llama", 2, 1), ("llama", 4, 3), ("gpt2", 2, 2), ("t5", 2, 2), ("bert", 2, 2)],
)
def test_fused_products_give_the_same_step(name: str, tp: int, samples: int) -> None:
    local = lowered(name, tp, samples, sequence_parallel=True).local(0, 0)
    assert_equal_steps(name, tp, samples, everything(local))


def test_products_of_float8_stay_apart() -> None:
    local = lowered("llama", 2, 2, sequence_parallel=True).local(0, 0)
    nodes = [
        replace(n, op="merakc.scaled_linear.default") if n.op == "aten.linear.default" else n
        for n in local.nodes
    ]
    assert FusedProducts(local).sites
    assert not FusedProducts(local.with_nodes(nodes)).sites


@pytest.mark.parametrize("seed", range(2))
def test_any_products_can_be_fused(seed: int) -> None:
    pick = random.Random(seed)
    name = ("gpt_neox", "vit")[seed]
    local = lowered(name, 2, 2, sequence_parallel=True).local(0, 0)
    sites = FusedProducts(local).sites
    of = FusedProducts(local).weights
    chosen = pick.sample(sites, len(sites) // 2)
    assert_equal_steps(name, 2, 2, sorted({of[p.name] for s in chosen for p in s.products}))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_every_collective_beside_products_is_fused_forward_and_backward(name: str) -> None:
    local = lowered(name, 2, 1, sequence_parallel=True).local(0, 0)
    plain, made = Counter(n.op for n in local.nodes), fuse_products(local, everything(local))
    ops = Counter(n.op for n in made.nodes)
    assert (ops[GATHER], ops[SCATTER]) == (0, 0)
    assert (ops[GATHER_MATMUL], ops[MATMUL_SCATTER]) == (plain[GATHER], plain[SCATTER])
    chunk = differentiate(made)
    assert chunk.backward is not None
    backward = Counter(n.op for n in chunk.backward.nodes)
    assert (backward[MATMUL_SCATTER], backward[GATHER_MATMUL]) == (plain[GATHER], plain[SCATTER])
    assert backward[SCATTER] == 0


def test_fused_products_compute_as_much() -> None:
    local = lowered("llama", 2, 1, sequence_parallel=True).local(0, 0)
    made = fuse_products(local, everything(local))
    assert graph_flops(made) == graph_flops(local)
    one, other = differentiate(made), differentiate(local)
    assert one.backward is not None
    assert other.backward is not None
    assert graph_flops(one.backward) == graph_flops(other.backward)


def test_alike_products_are_of_one_kind() -> None:
    local = lowered("llama", 2, 1, sequence_parallel=True).local(0, 0)
    kinds = [{name.replace("0.", "*.") for name in kind if ".layers.0." in name or "h" in name[:3]}
             for kind in FusedProducts(local).kinds()]  # fmt: skip
    layer = "model.layers.*.{}_proj.weight"
    attention, mlp = "self_attn.", "mlp."
    wanted = [
        {layer.format(attention + name) for name in "qkv"},
        {layer.format(attention + "o")},
        {layer.format(mlp + name) for name in ("gate", "up")},
        {layer.format(mlp + "down")},
    ]
    for kind in wanted:
        assert kind in kinds
    assert all(len(kind) % 4 == 0 for kind in FusedProducts(local).kinds()[:4])  # of four layers


def test_without_split_sequences_nothing_is_fused() -> None:
    local = lowered("llama", 2, 1, sequence_parallel=False).local(0, 0)
    assert FusedProducts(local).sites == ()
    weights = [i.target for i in local.inputs]
    assert fuse_products(local, weights) is local


def test_ranks_with_other_nodes_stay_apart() -> None:
    local = lowered("llama", 2, 1, sequence_parallel=True).local(0, 0)
    other = lowered("gpt2", 2, 1, sequence_parallel=True).local(0, 0)
    weights = everything(local)
    assert fuse_products(local, weights, (local, local)) != local
    assert fuse_products(local, weights, (local, other)) is local


FLOATS = torch.float64
PART, X = TensorSpec((3, 4), FLOATS), TensorSpec((6, 4), FLOATS)
W, B = TensorSpec((4, 4), FLOATS), TensorSpec((4,), FLOATS)
SIZES = (3, 3)


def node(name: str, op: str, *args: object, spec: TensorSpec = X) -> Node:
    return Node(name, op, args, (), (spec,))


def layer() -> list[Node]:
    """Two products of what is gathered, of which one is scattered again."""
    return [
        node("all", GATHER, Ref("x"), "tp", 0, SIZES, 0),
        node("a", "aten.addmm.default", Ref("b"), Ref("all"), Ref("v")),
        node("turned", "aten.t.default", Ref("w"), spec=W),
        node("c", "aten.mm.default", Ref("all"), Ref("turned")),
        node("both", "aten.mul.Tensor", Ref("a"), Ref("c")),
        node("d", "aten.mm.default", Ref("both"), Ref("v")),
        node("d.part", SCATTER, Ref("d"), "tp", 0, SIZES, 0, spec=PART),
    ]


def graph(nodes: list[Node], *outputs: str) -> Graph:
    made = Graph(
        (
            Input("x", InputKind.ACTIVATION, PART, requires_grad=True),
            Input("v", InputKind.PARAMETER, W, "first", requires_grad=True),
            Input("w", InputKind.PARAMETER, W, "second", requires_grad=True),
            Input("b", InputKind.PARAMETER, B, "bias", requires_grad=True),
        ),
        tuple(nodes),
        tuple(Output(name, OutputKind.ACTIVATION, Ref(name)) for name in ("d.part", *outputs)),
    )
    made.verify()
    return made


def test_what_a_weight_is_made_by_comes_first_and_a_bias_after() -> None:
    made = fuse_products(graph(layer()), ("first", "second"))
    assert [str(n) for n in made.nodes] == [
        "%turned: float64[4,4] = aten.t.default(%w)",
        "%all.matmul: float64[6,4], float64[6,4], float64[6,4] = merakc.gather_matmul.default("
        "%x, (%v, %turned), False, 'tp', 0, (3, 3), 0)",
        "%a: float64[6,4] = aten.add.Tensor(%all.matmul:1, %b)",
        "%both: float64[6,4] = aten.mul.Tensor(%a, %all.matmul:2)",
        "%d.part: float64[3,4] = merakc.matmul_scatter.default("
        "%both, %v, False, 'tp', 0, (3, 3), 0)",
    ]


def test_a_collective_stays_apart_without_all_of_its_products() -> None:
    made = fuse_products(graph(layer()), ("first",))
    assert [n.op for n in made.nodes if "merakc" in n.op] == [GATHER, MATMUL_SCATTER]
    assert fuse_products(graph(layer()), ("second",)) == graph(layer())


def changed(name: str, **new: object) -> list[Node]:
    return [replace(n, **new) if n.name == name else n for n in layer()]  # type: ignore[arg-type]


UNEVEN = (2, 4)
HALF = TensorSpec((4, 4), torch.float16)
MIXED = node("turned", "aten.to.dtype", Ref("w"), torch.float16, spec=HALF)
FUSABLE = [
    (layer(), (), {"all", "d"}),
    ([*layer(), node("e", "aten.neg.default", Ref("all"))], ("e",), {"d"}),  # another reader
    (layer(), ("all",), {"d"}),
    ([*layer(), node("e", "aten.neg.default", Ref("d"))], ("e",), {"all"}),
    (layer(), ("d",), {"all"}),
    (changed("all", args=(Ref("x"), "tp", 0, UNEVEN, 0)), (), {"d"}),
    (changed("d.part", args=(Ref("d"), "tp", 0, UNEVEN, 0)), (), {"all"}),
    (changed("all", args=(Ref("x"), "tp", 1, SIZES, 0)), (), {"d"}),  # the dim of the sums
    (changed("c", op="aten.linear.default"), (), {"d"}),  # one turned, one not
    (changed("c", args=(Ref("turned"), Ref("all"))), (), {"d"}),  # on the right
    (changed("c", args=(Ref("all"), Ref("a"))), (), {"d"}),  # no parameter
    (changed("c", grad=False), (), {"d"}),
    (changed("c", kwargs=(("out_dtype", torch.float64),)), (), {"d"}),
    (changed("d", op="aten.addmm.default", args=(Ref("b"), Ref("both"), Ref("v"))), (), {"all"}),
    ([MIXED if n.name == "turned" else n for n in layer()], (), {"d"}),
]


@pytest.mark.parametrize(("nodes", "outputs", "wanted"), FUSABLE)
def test_what_can_be_fused(nodes: list[Node], outputs: tuple[str, ...], wanted: set[str]) -> None:
    sites = FusedProducts(graph(nodes, *outputs)).sites
    named = {"d" if site.collective.op == SCATTER else "all" for site in sites}
    assert named == wanted


@pytest.mark.parametrize("symmetric", [False, True])
def test_what_planning_expects_of_fused_products_is_what_their_graphs_take(symmetric: bool) -> None:
    # Products and links alone take time, each as much as the other.
    machine = Cluster("products", 1e6, 1e18, 0.0, 1, 0.0, 5e5, symmetric_memory=symmetric)
    cluster = place_on(machine, 2)
    local = lowered("llama", 2, 1, sequence_parallel=True).local(0, 0)
    made = fuse_products(local, everything(local))
    chunk = differentiate(made)
    assert chunk.backward is not None
    tasks = [t for graph in (chunk.forward, chunk.backward) for t in graph_tasks(graph, cluster)]
    wanted_s = sum(t.compute_s + t.link_s for t in tasks)
    assert stage_seconds(made, cluster)[1] == pytest.approx(wanted_s, rel=0.02)
    specs, nodes = chunk.forward.specs(), {n.name: n for n in chunk.forward.nodes}
    found = [t for t in graph_tasks(chunk.forward, cluster) if t.holds_link]
    for task in found:
        own = pipelined(nodes[task.name], specs, cluster)
        assert task.compute_s == pytest.approx(own.seconds + 0.126 * own.hidden_s)
        assert (own.hidden_s > 0) is symmetric
    assert found
    whole_s = stage_seconds(local, cluster)[1]
    assert (stage_seconds(made, cluster)[1] < 0.98 * whole_s) is symmetric


def test_no_recomputation_runs_them_again() -> None:
    local = lowered("llama", 2, 1, sequence_parallel=True).local(0, 0)
    chunk = differentiate(fuse_products(local, everything(local)))
    for kept in (selective(chunk), within_bytes(chunk, 0, place_on(NOMINAL_GPU, 2))):
        again = checkpointed(chunk, kept).recompute
        assert again is not None
        assert again.nodes
        assert not any(n.op in PIPELINED for n in again.nodes)
    everything_again = checkpointed(chunk, ()).recompute
    assert everything_again is not None
    assert any(n.op in PIPELINED for n in everything_again.nodes)
