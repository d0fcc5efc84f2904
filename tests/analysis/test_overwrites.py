"""What may be overwritten, case by case, and that whole models compute the same so."""

from __future__ import annotations

import pytest
import torch

from merakc.analysis.liveness import live_bytes
from merakc.analysis.overwrites import OVERWRITING, overwrites
from merakc.ir.graph import Graph, Input, InputKind, Node, Output, OutputKind, Ref, TensorSpec
from merakc.lowering.lowered import training_graph
from merakc.passes.autodiff.interpret import interpret
from merakc.passes.pipeline import differentiate
from merakc.runtime.codegen import compile_graph
from tests.passes.whole_models import eager

F64 = torch.float64
SPEC = TensorSpec((4, 4), F64)
Step = tuple[str, str, tuple[object, ...]]
X, A, B = Ref("x"), Ref("a"), Ref("b")
MADE: Step = ("a", "aten.sin.default", (X,))


def graph(*steps: Step, outputs: tuple[str, ...] = ()) -> Graph:
    x = Input("x", InputKind.BATCH, SPEC, "x")
    nodes = tuple(Node(name, op, args, (), (SPEC,)) for name, op, args in steps)
    names = outputs or (steps[-1][0],)
    return Graph((x,), nodes, tuple(Output(n, OutputKind.RESULT, Ref(n)) for n in names))


CASES: dict[str, tuple[Graph, dict[str, int]]] = {
    "what is made here and read once": (graph(MADE, ("y", "aten.exp.default", (A,))), {"y": 0}),
    "an input": (graph(("y", "aten.exp.default", (X,))), {}),
    "the other factor": (graph(MADE, ("y", "aten.mul.Tensor", (X, A))), {"y": 1}),
    "what is subtracted": (graph(MADE, ("y", "aten.sub.Tensor", (X, A))), {}),
    "its square": (graph(MADE, ("y", "aten.mul.Tensor", (A, A))), {"y": 0}),
    "what is added to itself, each element elsewhere": (
        graph(MADE, ("y", "aten.scatter_add.default", (A, 0, X, A))),
        {},
    ),
    "what another is added to, each element elsewhere": (
        graph(MADE, ("y", "aten.scatter_add.default", (A, 0, X, X))),
        {"y": 0},
    ),
    "a factor and its transpose": (
        graph(MADE, ("b", "aten.t.default", (A,)), ("y", "aten.mul.Tensor", (A, B))),
        {},
    ),
    "what is read later": (
        graph(MADE, ("b", "aten.exp.default", (A,)), ("y", "aten.mul.Tensor", (A, B))),
        {"y": 0},
    ),
    "what is read later through a view": (
        graph(
            MADE,
            ("v", "aten.t.default", (A,)),
            ("b", "aten.exp.default", (A,)),
            ("y", "aten.sub.Tensor", (Ref("v"), B)),
        ),
        {"y": 0},
    ),
    "an output": (graph(MADE, ("y", "aten.exp.default", (A,)), outputs=("a", "y")), {}),
    "an output's view": (
        graph(
            MADE,
            ("v", "aten._unsafe_view.default", (A, (4, 4))),
            ("y", "aten.exp.default", (A,)),
            outputs=("v", "y"),
        ),
        {},
    ),
    "what another op has been given": (
        graph(MADE, ("s", "start.all_reduce", (A, "tp", "sum")), ("y", "aten.exp.default", (A,))),
        {},
    ),
    "a chain": (
        graph(MADE, ("b", "aten.exp.default", (A,)), ("y", "aten.neg.default", (B,))),
        {"b": 0, "y": 0},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_cases(name: str) -> None:
    found, wanted = CASES[name]
    assert overwrites(found) == wanted


def test_other_sizes_and_dtypes_are_left_alone() -> None:
    row, bits = TensorSpec((1, 4), F64), TensorSpec((4, 4), torch.float32)
    x = Input("x", InputKind.BATCH, SPEC, "x")
    nodes = (
        Node("r", "aten.sum.dim_IntList", (X, (0,), True), (), (row,)),
        Node("e", "aten.expand.default", (Ref("r"), (4, 4)), (), (SPEC,)),
        Node("m", "aten.mul.Tensor", (Ref("e"), X), (), (SPEC,)),
        Node("h", "aten._to_copy.default", (X,), (("dtype", torch.float32),), (bits,)),
        Node("y", "aten.mul.Tensor", (Ref("h"), X), (), (SPEC,)),
    )
    outputs = tuple(Output(n, OutputKind.RESULT, Ref(n)) for n in ("m", "y"))
    assert overwrites(Graph((x,), nodes, outputs)) == {}


def test_a_part_that_is_expanded_to_the_size_of_the_whole_is_left_alone() -> None:
    pair, one, row = (TensorSpec(shape, F64) for shape in ((2, 1), (1, 1), (1, 2)))
    x = Input("x", InputKind.BATCH, pair, "x")
    nodes = (
        Node("a", "aten.sin.default", (X,), (), (pair,)),
        Node("s", "aten.slice.Tensor", (A, 0, 0, 1), (), (one,)),
        Node("e", "aten.expand.default", (Ref("s"), (1, 2)), (), (row,)),
        Node("y", "aten.exp.default", (Ref("e"),), (), (row,)),
    )
    made = Graph((x,), nodes, (Output("y", OutputKind.RESULT, Ref("y")),))
    assert overwrites(made) == {}


def test_compiled_graphs_overwrite_and_are_counted_so() -> None:
    made = graph(MADE, ("b", "aten.exp.default", (A,)), ("y", "aten.sub.Tensor", (B, X)))
    x = torch.randn(4, 4, dtype=F64)
    found = compile_graph(made, torch.device("cpu"))([x])
    assert torch.equal(found[0], x.sin().exp() - x)
    assert live_bytes(made).peak_bytes == SPEC.size_bytes


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5", "resnet"])
def test_models_compute_the_same_bits(name: str) -> None:
    one = eager(name)
    chunk = differentiate(training_graph(one.recording.graph))
    assert len(overwrites(chunk.forward)) > 1
    generator = torch.Generator().manual_seed(0)
    for part in (chunk.forward, chunk.backward):
        assert part is not None
        given = {i.name: _value(i, part, one.state, generator) for i in part.inputs}
        wanted = interpret(part, given)
        kept = {name: value.clone() for name, value in given.items()}
        free = [i.name for i in part.inputs]
        found = compile_graph(part, torch.device("cpu"))([given[n] for n in free])
        for out, own, other in zip(part.outputs, found, wanted, strict=True):
            assert torch.equal(own, other) or bool(other.isnan().any()), out.name
        assert all(torch.equal(given[n], kept[n]) for n in free)


def _value(
    item: Input, part: Graph, state: dict[str, torch.Tensor], generator: torch.Generator
) -> torch.Tensor:
    if item.name in part.constants:
        return part.constants[item.name]
    if item.name in state:
        return state[item.name]
    if item.spec.dtype.is_floating_point:
        return torch.rand(item.spec.shape, generator=generator, dtype=item.spec.dtype)
    return torch.zeros(item.spec.shape, dtype=item.spec.dtype)


def test_each_call_is_the_op_written_over_its_argument() -> None:
    x, y = torch.rand(3, 3, dtype=F64), torch.rand(3, 3, dtype=F64) + 1
    mask, index = x > 0.5, torch.zeros(3, 3, dtype=torch.int64)
    others = {"masked_fill": (mask, 2.0), "scatter_add": (1, index, y), "neg": (), "exp": ()}
    for op, (places, call) in OVERWRITING.items():
        room, name, overload = op.split(".")
        if room != "aten":
            continue
        rest = others.get(name, (3.0,) if overload == "Scalar" else (y,))
        wanted = getattr(getattr(torch.ops.aten, name), overload)(x, *rest)
        own = x.clone()
        assert call(own, *rest) is own
        assert torch.equal(own, wanted), op
        assert places == ((0, 1) if name in ("add", "mul") and overload == "Tensor" else (0,)), op


def test_a_view_of_a_number_is_in_no_memory() -> None:
    """The backward of `1j * x` conjugates `1j`."""
    spec = TensorSpec((), torch.complex128)
    node = Node("conj", "aten._conj.default", (1j,), (), (spec,))
    double = Node("double", "aten.mul.Tensor", (Ref("conj"), 2.0), (), (spec,))
    graph = Graph((), (node, double), (Output("out", OutputKind.RESULT, Ref("double")),))
    assert overwrites(graph) == {}
