"""Flops against torch's own counter, bytes by hand."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from merakc.costs.nodes import ring_backward
from merakc.costs.work.flops import graph_flops, node_bytes, node_flops, ring_sent, wire_bytes
from merakc.equality.casts import lifted_casts
from merakc.ir.graph import Graph, Node, Ref, TensorSpec
from merakc.kernels.opaque import OPAQUE, OPAQUE_BACKWARD, Call, enter
from merakc.kernels.ring.attention import RING
from merakc.kernels.ring.swap import SWAP
from merakc.lowering.lowered import training_graph
from merakc.passes.pipeline import differentiate
from tests.passes.whole_models import Eager, eager

HALF = torch.bfloat16


def counted(case: Eager) -> int:
    """What torch counts in an eager step; it sees nothing of attention on a CPU."""
    with FlopCounterMode(display=False) as counter, lifted_casts():
        case.model(**case.batch)["loss"].backward()
    case.model.zero_grad()
    total: int = counter.get_total_flops()
    return total


def without_attention(graph: Graph) -> int:
    specs = graph.specs()
    return sum(node_flops(n, specs) for n in graph.nodes if "attention" not in n.op)


@pytest.mark.parametrize("name", ["gpt2", "bert", "vit", "transformer_encoder", "resnet", "opt"])
def test_a_differentiated_model_has_the_flops_that_torch_counts(name: str) -> None:
    case = eager(name)
    chunk = differentiate(training_graph(case.recording.graph))
    assert chunk.backward is not None
    assert without_attention(chunk.forward) + without_attention(chunk.backward) == counted(case)


def test_a_recorded_forward_has_the_flops_of_its_decomposition() -> None:
    for name in ("gpt2", "llama", "t5"):
        graph = training_graph(eager(name).recording.graph)
        assert graph_flops(graph) == graph_flops(differentiate(graph).forward)


def flops(op: str, *shapes: tuple[int, ...], out: tuple[int, ...]) -> int:
    specs = {Ref(f"x{k}"): TensorSpec(s, HALF) for k, s in enumerate(shapes)}
    return node_flops(Node("y", op, tuple(specs), (), (TensorSpec(out, HALF),)), specs)


def test_formulas() -> None:
    assert flops("aten.linear.default", (2, 3, 5), (7, 5), out=(2, 3, 7)) == 2 * 2 * 3 * 5 * 7
    assert flops("aten.matmul.default", (4, 3, 5), (4, 5, 7), out=(4, 3, 7)) == 2 * 4 * 3 * 5 * 7
    assert flops("aten.mm.default", (3, 5), (5, 7), out=(3, 7)) == 2 * 3 * 5 * 7
    heads = ((2, 8, 10, 16), (2, 4, 12, 16), (2, 4, 12, 16))
    assert flops("merakc.attention.default", *heads, out=heads[0]) == 4 * 2 * 8 * 10 * 12 * 16
    backward = flops("merakc.attention_backward.default", heads[0], *heads, out=heads[0])
    assert backward == 10 * 2 * 8 * 10 * 12 * 16
    assert flops("aten.add.Tensor", (3, 5), (3, 5), out=(3, 5)) == 0
    assert flops("merakc.copy_to.default", (3, 5), out=(3, 5)) == 0


def test_bytes_count_each_argument_once_and_views_not_at_all() -> None:
    specs = {Ref("x"): TensorSpec((4, 8), HALF), Ref("y"): TensorSpec((8,), torch.float32)}
    add = Node("z", "aten.add.Tensor", (Ref("x"), Ref("y")), (), (TensorSpec((4, 8), HALF),))
    assert node_bytes(add, specs) == 64 + 32 + 64
    square = Node("z", "aten.mul.Tensor", (Ref("x"), Ref("x")), (), (TensorSpec((4, 8), HALF),))
    assert node_bytes(square, specs) == 64 + 64
    view = Node("z", "aten.t.default", (Ref("x"),), (), (TensorSpec((8, 4), HALF),))
    assert node_bytes(view, specs) == 0


def test_a_module_that_runs_as_it_is_has_the_flops_of_its_trial() -> None:
    call = Call(lambda inputs: [inputs[0]], (((2,), HALF),), flops=7)
    x, specs = Ref("x"), {Ref("x"): TensorSpec((2,), HALF)}
    forward = Node("y", OPAQUE, ((x,), (), enter(call)), (), (specs[x],))
    backward = Node("g", OPAQUE_BACKWARD, ((x,), (x,), (), enter(call), (True,)), (), (specs[x],))
    assert node_flops(forward, specs) == 7
    assert node_flops(backward, specs) == 21  # its forward runs again


def test_products_beside_collectives_count_as_products_alone() -> None:
    specs = {Ref("x"): TensorSpec((2, 3, 5), HALF), Ref("v"): TensorSpec((7, 5), HALF),
             Ref("w"): TensorSpec((9, 5), HALF), Ref("z"): TensorSpec((2, 6, 5), HALF)}  # fmt: skip
    place = (True, "tp", 1, (3, 3), 0)
    whole, *outs = (TensorSpec((2, 6, n), HALF) for n in (5, 7, 9))
    gather = Node(
        "y", "merakc.gather_matmul.default", (Ref("x"), (Ref("v"), Ref("w")), *place), (),
        (whole, *outs),
    )  # fmt: skip
    assert node_flops(gather, specs) == 2 * 12 * 5 * (7 + 9)
    assert node_bytes(gather, specs) == 2 * (60 + 35 + 45 + 84 + 108)
    assert wire_bytes(gather, specs) == 2 * 60
    scatter = Node(
        "y", "merakc.matmul_scatter.default", (Ref("z"), Ref("v"), *place), (),
        (TensorSpec((2, 3, 7), HALF),),
    )  # fmt: skip
    assert node_flops(scatter, specs) == 2 * 12 * 5 * 7
    assert node_bytes(scatter, specs) == 2 * (60 + 35 + 84)
    assert wire_bytes(scatter, specs) == 2 * 84


def test_a_collective_moves_the_larger_of_its_tensors() -> None:
    specs = {Ref("x"): TensorSpec((3, 5), HALF)}
    place = (Ref("x"), "tp", 0, (3, 3), 0)
    gather = Node("y", "merakc.gather_to.default", place, (), (TensorSpec((6, 5), HALF),))
    assert wire_bytes(gather, specs) == 2 * 30
    scatter = Node("y", "merakc.scatter.default", place, (), (TensorSpec((1, 5), HALF),))
    assert wire_bytes(scatter, specs) == 2 * 15


def test_of_causal_rows_the_last_attend_to_most() -> None:
    """Of four ranks the last computes 28 of 64 blocks with half of the diagonal ones, not 16."""
    specs = {Ref("q"): TensorSpec((1, 2, 4, 8), HALF), Ref("k"): TensorSpec((1, 2, 16, 8), HALF)}
    specs |= {Ref("whole"): TensorSpec((1, 2, 16, 8), HALF)}

    def flops(query: str, *, causal: bool, backward: bool = False) -> int:
        read: tuple[object, ...] = (Ref(query), Ref("k"), Ref("k"))
        if backward:
            read = (Ref(query), *read, Ref(query), Ref("lse"))
        op = f"merakc.attention{'_backward' if backward else ''}.default"
        return node_flops(
            Node("y", op, (*read, None, causal, 1.0, 12), (), (specs[Ref(query)],)), specs
        )

    for backward in (False, True):
        all_pairs = flops("whole", causal=False, backward=backward)
        assert all_pairs == (10 if backward else 4) * 2 * 16 * 16 * 8
        assert flops("whole", causal=True, backward=backward) == all_pairs
        assert 4 * flops("q", causal=False, backward=backward) == all_pairs
        assert 16 * flops("q", causal=True, backward=backward) == 7 * all_pairs


def _ring(hops: tuple[int, ...], *, mask: bool = False, causal: bool, swapped: bool) -> Node:
    shape = TensorSpec((1, 4, 8, 16), HALF)
    args = (*map(Ref, "qkv"), Ref("m") if mask else None, causal, 1.0, None)
    return Node("y", RING, (*args, "cp", (8,) * 4, hops, swapped, 0), (), (shape, shape))


def _ring_specs() -> dict[Ref, TensorSpec]:
    block = {Ref(name): TensorSpec((1, 2, 8, 16), HALF) for name in "kv"}
    mask = {Ref("m"): TensorSpec((1, 1, 8, 32), torch.bool)}
    return {Ref("q"): TensorSpec((1, 4, 8, 16), HALF), **block, **mask}


def test_of_rings_the_slowest_rank_counts() -> None:
    block, specs, every = 4 * 4 * 8 * 8 * 16, _ring_specs(), (0, 1, 2, 3)
    found = [
        node_flops(_ring(hops, mask=mask, causal=causal, swapped=swapped), specs)
        for hops, mask, causal, swapped in [
            (every, False, False, False), (every, False, True, True), (every, False, True, False),
            ((0, 1), True, True, False), (every, True, True, True),
        ]
    ]  # fmt: skip
    # As of other causal attentions no mask is counted, but for what ranks wait for each other.
    assert found == [4 * block, 4 * block, 7 * block, 2 * block, 2.5 * block]


def test_a_ring_sends_blocks_and_the_sums_of_their_gradients() -> None:
    specs, node = _ring_specs(), _ring((0, 1, 2, 3), causal=True, swapped=True)
    block = 2 * 2 * 8 * 16  # elements
    assert ring_sent(node, specs) == 3 * block * 2
    specs |= dict.fromkeys(node.made, TensorSpec((1, 4, 8, 16), HALF))
    back = ring_backward(node, specs)
    assert ring_sent(back, specs) == 3 * block * 2 + 4 * block * 4
    assert wire_bytes(node, specs) == 4 * block * 2  # a gather of as much sends all but its own
    assert node_flops(back, specs) == node_flops(node, specs) * 5 // 2
    alone = _ring((0,), mask=True, causal=True, swapped=False)
    assert ring_sent(alone, specs) == ring_sent(ring_backward(alone, specs), specs) == 0


def test_a_swap_sends_half_of_what_it_has() -> None:
    node = Node("y", SWAP, (Ref("q"), "cp", 2, (4, 4), (4, 4), 0), (), (_ring_specs()[Ref("q")],))
    assert wire_bytes(node, _ring_specs()) == 4 * 8 * 16
