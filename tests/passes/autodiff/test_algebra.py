"""Algebra: golden text of what stands in whose place, the same bits, and fewer passes of models."""

from __future__ import annotations

import pytest
import torch

from merakc.ir.graph import Graph, Input, InputKind, Node, Output, OutputKind, Ref, TensorSpec
from merakc.lowering.lowered import training_graph
from merakc.passes.autodiff.algebra import fewer_passes
from merakc.passes.autodiff.interpret import interpret
from merakc.passes.pipeline import differentiate
from tests.passes.whole_models import eager

F32, F16 = torch.float32, torch.float16
X, S, INDEX = Ref("x"), Ref("s"), Ref("i")
Step = tuple[str, str, tuple[object, ...], tuple[int, ...]]


def graph(*steps: Step, dtype: torch.dtype = F32) -> Graph:
    """Of x [2, 6], s [2, 1] and indices i [2, 1]; the last step is the output."""
    inputs = (
        Input("x", InputKind.BATCH, TensorSpec((2, 6), dtype)),
        Input("s", InputKind.BATCH, TensorSpec((2, 1), dtype)),
        Input("i", InputKind.BATCH, TensorSpec((2, 1), torch.int64)),
    )
    nodes = tuple(
        Node(
            name,
            f"aten.{op}",
            args,
            (),
            (TensorSpec(shape, torch.int64 if name == "j" else dtype),),
        )
        for name, op, args, shape in steps
    )
    return Graph(inputs, nodes, (Output("y", OutputKind.RESULT, Ref(steps[-1][0])),))


def values(dtype: torch.dtype = F32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, s = (torch.randn(shape, generator=generator).to(dtype) for shape in ((2, 6), (2, 1)))
    return {"x": x, "s": s, "i": torch.tensor([[3], [0]])}


WIDE: Step = ("e", "expand.default", (S, (2, 6)), (2, 6))
FIRST: Step = ("a", "slice_backward.default", (Ref("l"), (2, 6), 1, 0, 2, 1), (2, 6))
LAST: Step = ("b", "slice_backward.default", (Ref("r"), (2, 6), -1, 2, 2**63 - 1, 1), (2, 6))
LEFT: Step = ("l", "slice.Tensor", (X, 1, 1, 3), (2, 2))
RIGHT: Step = ("r", "slice.Tensor", (X, 1, 0, 4), (2, 4))
ZEROS: Step = ("z", "new_zeros.default", (S, (2, 6)), (2, 6))
PUT: Step = ("p", "scatter_add.default", (Ref("z"), -1, INDEX, S), (2, 6))

CASES: dict[str, tuple[tuple[Step, ...], list[str]]] = {
    "a first power and a product with one": (
        (
            ("a", "pow.Tensor_Scalar", (X, 1.0), (2, 6)),
            ("b", "mul.Tensor", (Ref("a"), 1.0), (2, 6)),
            ("c", "neg.default", (Ref("b"),), (2, 6)),
        ),
        ["%c: float32[2,6] = aten.neg.default(%x)"],
    ),
    "a sum with zero that is read twice": (
        (
            ("a", "add.Tensor", (X, 0), (2, 6)),
            ("b", "mul.Tensor", (Ref("a"), Ref("a")), (2, 6)),
        ),
        ["%b: float32[2,6] = aten.mul.Tensor(%x, %x)"],
    ),
    "an expansion that is scaled": (
        (
            WIDE,
            ("d", "div.Scalar", (Ref("e"), 3), (2, 6)),
            ("m", "mul.Tensor", (Ref("d"), X), (2, 6)),
        ),
        [
            "%d.small: float32[2,1] = aten.div.Scalar(%s, 3)",
            "%d: float32[2,6] = aten.expand.default(%d.small, (2, 6))",
            "%m: float32[2,6] = aten.mul.Tensor(%d, %x)",
        ],
    ),
    "an expansion that is scaled and then viewed": (
        (
            WIDE,
            ("d", "div.Scalar", (Ref("e"), 3), (2, 6)),
            ("v", "view.default", (Ref("d"), (12,)), (12,)),
        ),
        [
            "%e: float32[2,6] = aten.expand.default(%s, (2, 6))",
            "%d: float32[2,6] = aten.div.Scalar(%e, 3)",
            "%v: float32[12] = aten.view.default(%d, (12))",
        ],
    ),
    "an expansion that is multiplied by one and then viewed": (
        (
            WIDE,
            ("d", "mul.Scalar", (Ref("e"), 1), (2, 6)),
            ("v", "view.default", (Ref("d"), (12,)), (12,)),
        ),
        [
            "%e: float32[2,6] = aten.expand.default(%s, (2, 6))",
            "%d: float32[2,6] = aten.mul.Scalar(%e, 1)",
            "%v: float32[12] = aten.view.default(%d, (12))",
        ],
    ),
    "an expansion that something else reads too": (
        (
            WIDE,
            ("d", "div.Scalar", (Ref("e"), 3), (2, 6)),
            ("m", "mul.Tensor", (Ref("d"), Ref("e")), (2, 6)),
        ),
        [
            "%e: float32[2,6] = aten.expand.default(%s, (2, 6))",
            "%d: float32[2,6] = aten.div.Scalar(%e, 3)",
            "%m: float32[2,6] = aten.mul.Tensor(%d, %e)",
        ],
    ),
    "a factor scaled by a power of two": (
        (
            WIDE,
            ("t", "mul.Scalar", (X, 2.0), (2, 6)),
            ("m", "mul.Tensor", (Ref("e"), Ref("t")), (2, 6)),
        ),
        [
            "%m.small: float32[2,1] = aten.mul.Scalar(%s, 2.0)",
            "%m.wide: float32[2,6] = aten.expand.default(%m.small, (2, 6))",
            "%m: float32[2,6] = aten.mul.Tensor(%m.wide, %x)",
        ],
    ),
    "a factor scaled by three": (
        (
            WIDE,
            ("t", "mul.Scalar", (X, 3.0), (2, 6)),
            ("m", "mul.Tensor", (Ref("t"), Ref("e")), (2, 6)),
        ),
        [
            "%e: float32[2,6] = aten.expand.default(%s, (2, 6))",
            "%t: float32[2,6] = aten.mul.Scalar(%x, 3.0)",
            "%m: float32[2,6] = aten.mul.Tensor(%t, %e)",
        ],
    ),
    "two parts of a tensor, the last one first": (
        (LEFT, RIGHT, FIRST, LAST, ("c", "add.Tensor", (Ref("b"), Ref("a")), (2, 6))),
        [
            "%l: float32[2,2] = aten.slice.Tensor(%x, 1, 1, 3)",
            "%r: float32[2,4] = aten.slice.Tensor(%x, 1, 0, 4)",
            "%c: float32[2,6] = aten.cat.default((%l, %r), 1)",
        ],
    ),
    "parts that leave a gap": (
        (
            LEFT,
            FIRST,
            ("b", "slice_backward.default", (Ref("l"), (2, 6), 1, 4, 6, 1), (2, 6)),
            ("c", "add.Tensor", (Ref("a"), Ref("b")), (2, 6)),
        ),
        [
            "%l: float32[2,2] = aten.slice.Tensor(%x, 1, 1, 3)",
            "%a: float32[2,6] = aten.slice_backward.default(%l, (2, 6), 1, 0, 2, 1)",
            "%b: float32[2,6] = aten.slice_backward.default(%l, (2, 6), 1, 4, 6, 1)",
            "%c: float32[2,6] = aten.add.Tensor(%a, %b)",
        ],
    ),
    "a sum with what is scattered into zeros": (
        (ZEROS, PUT, ("c", "add.Tensor", (X, Ref("p")), (2, 6))),
        ["%c: float32[2,6] = aten.scatter_add.default(%x, -1, %i, %s)"],
    ),
    "a sum with what is scattered into zeros for all rows": (
        (
            ("z", "new_zeros.default", (S, (1, 6)), (1, 6)),
            ("j", "slice.Tensor", (INDEX, 0, 0, 1), (1, 1)),
            ("p", "scatter_add.default", (Ref("z"), -1, Ref("j"), S), (1, 6)),
            ("c", "add.Tensor", (X, Ref("p")), (2, 6)),
        ),
        [
            "%z: float32[1,6] = aten.new_zeros.default(%s, (1, 6))",
            "%j: int64[1,1] = aten.slice.Tensor(%i, 0, 0, 1)",
            "%p: float32[1,6] = aten.scatter_add.default(%z, -1, %j, %s)",
            "%c: float32[2,6] = aten.add.Tensor(%x, %p)",
        ],
    ),
    "a sum with what is scattered into something": (
        (
            ("p", "scatter_add.default", (X, -1, INDEX, S), (2, 6)),
            ("c", "add.Tensor", (X, Ref("p")), (2, 6)),
        ),
        [
            "%p: float32[2,6] = aten.scatter_add.default(%x, -1, %i, %s)",
            "%c: float32[2,6] = aten.add.Tensor(%x, %p)",
        ],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_golden(name: str) -> None:
    steps, wanted = CASES[name]
    before = graph(*steps)
    after = fewer_passes(before)
    after.verify()
    assert [str(n) for n in after.nodes] == wanted
    assert torch.equal(interpret(after, values())[0], interpret(before, values())[0])


def test_halves_are_scaled_where_they_were() -> None:
    steps = CASES["a factor scaled by a power of two"][0]
    before = graph(*steps, dtype=F16)
    assert str(fewer_passes(before)) == str(before)


def test_an_output_of_a_node_that_goes_is_its_argument() -> None:
    after = fewer_passes(graph(("a", "sub.Tensor", (X, 0), (2, 6))))
    assert not after.nodes
    assert after.outputs[0].ref == X


def test_a_number_that_changes_the_dtype_stays() -> None:
    inputs = (Input("i", InputKind.BATCH, TensorSpec((2,), torch.int64)),)
    node = Node("a", "aten.add.Tensor", (Ref("i"), 0.0), (), (TensorSpec((2,), F32),))
    before = Graph(inputs, (node,), (Output("y", OutputKind.RESULT, Ref("a")),))
    assert fewer_passes(before) == before


def test_no_model_multiplies_whole_tensors_by_what_is_one_or_expanded() -> None:
    chunk = differentiate(training_graph(eager("llama").recording.graph))
    for part in (chunk.forward, chunk.backward):
        assert part is not None
        specs = part.specs()
        ones = [n for n in part.nodes if n.op == "aten.pow.Tensor_Scalar" and n.args[1] == 1]
        rotated = [n for n in part.nodes if n.op == "aten.slice_backward.default"]
        scattered = [n for n in part.nodes if n.op == "aten.new_zeros.default"]
        made = {Ref(n.name): n for n in part.nodes}
        expanded = [
            n
            for n in part.nodes
            if n.op == "aten.div.Scalar"
            and n.args[0] in made
            and made[n.args[0]].op == "aten.expand.default"
            and specs[n.args[0]].numel > 1
        ]
        assert not ones + rotated + scattered + expanded
