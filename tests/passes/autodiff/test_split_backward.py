"""The halves of a backward: what each computes, and that in sequence they equal the whole."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.models import MODELS
from merakc.analysis.liveness import live_bytes
from merakc.costs.work.memory import order_bytes
from merakc.frontend.record import record
from merakc.ir.graph import Graph, Input, InputKind, Node, Output, OutputKind, Ref, TensorSpec
from merakc.ir.program import ActionKind, Mesh, StageGraphs
from merakc.ir.strategy import Strategy
from merakc.lowering.lowered import make_plan
from merakc.machines.cluster import NOMINAL_CPU
from merakc.passes.autodiff.interpret import interpret
from merakc.passes.autodiff.split_backward import CONVOLUTION, split_backward
from merakc.passes.pipeline import differentiate
from tests.frontend.small import Small

PRODUCTS = ("aten.mm.default", "aten.addmm.default", "aten.bmm.default")
STAGES = 3


def _two_layers() -> Graph:
    spec = TensorSpec((8, 6), torch.float64)
    square = TensorSpec((6, 6), torch.float64)
    x = Input("x", InputKind.ACTIVATION, spec, "x", True)
    weights = [Input(n, InputKind.PARAMETER, square, n, True) for n in ("a", "b")]
    nodes = (
        Node("p", "aten.mm.default", (Ref("x"), Ref("a")), (), (spec,)),
        Node("q", "aten.tanh.default", (Ref("p"),), (), (spec,)),
        Node("r", "aten.mm.default", (Ref("q"), Ref("b")), (), (spec,)),
    )
    return Graph((x, *weights), nodes, (Output("r", OutputKind.ACTIVATION, Ref("r")),))


def test_the_input_half_has_no_product_of_a_weight_gradient() -> None:
    chunk = differentiate(_two_layers())
    assert chunk.backward is not None
    first, second = split_backward(chunk)
    first.verify()
    second.verify()
    assert [o.name for o in first.outputs if o.kind is OutputKind.GRADIENT] == ["x"]
    assert sorted(o.name for o in second.outputs) == ["a", "b"]
    assert sum(n.op in PRODUCTS for n in first.nodes) == 2
    assert sum(n.op in PRODUCTS for n in second.nodes) == 2


def test_each_node_is_in_one_half() -> None:
    chunk = differentiate(_two_layers())
    assert chunk.backward is not None
    first, second = ({n.name for n in part.nodes} for part in split_backward(chunk))
    assert not first & second
    assert first | second == {n.name for n in chunk.backward.nodes}


def test_without_an_activation_the_first_half_is_empty() -> None:
    graph = _two_layers()
    fixed = tuple(
        Input(i.name, InputKind.BATCH, i.spec, i.target) if i.name == "x" else i
        for i in graph.inputs
    )
    chunk = differentiate(Graph(fixed, graph.nodes, graph.outputs))
    first, second = split_backward(chunk)
    assert not first.nodes
    assert sorted(o.name for o in second.outputs) == ["a", "b"]


def _products(graph: Graph | None) -> int:
    """Matrix products and convolutions' gradients."""
    return sum(n.op in (*PRODUCTS, CONVOLUTION) for n in graph.nodes) if graph else 0


def _values(inputs: tuple[Input, ...]) -> dict[str, torch.Tensor]:
    """Small numbers for every input: integers are valid as indices and as labels."""
    draw = torch.Generator().manual_seed(0)
    found = {}
    for item in inputs:
        shape, dtype = item.spec.shape, item.spec.dtype
        if dtype.is_floating_point:
            found[item.name] = torch.rand(shape, generator=draw, dtype=dtype) + 0.5
        else:
            found[item.name] = torch.randint(0, 2, shape, generator=draw).to(dtype)
    return found


def _check_stage(chunk: StageGraphs, sent: dict[str, torch.Tensor]) -> None:
    """`sent` has what earlier stages have made, and gets what this one makes."""
    whole, forward = chunk.backward, chunk.forward
    assert whole is not None
    first, second = split_backward(chunk)
    first.verify()
    second.verify()
    values = _values(tuple(i for i in forward.inputs if i.name not in forward.constants))
    values |= {name: sent[name] for name in values if name in sent}
    outs = interpret(forward, values)
    sent |= {o.name: v.detach() for o, v in zip(forward.outputs, outs, strict=True)}
    values |= _values(tuple(i for i in whole.inputs if i.kind is InputKind.TANGENT))
    saved = {o.name: v for o, v in zip(forward.outputs, outs, strict=True)}

    def run(graph: Graph) -> dict[str, torch.Tensor]:
        given = {
            i.name: saved[i.target] if i.kind is InputKind.SAVED else values[i.name]
            for i in graph.inputs
            if i.name not in graph.constants
        }
        names = [o.name for o in graph.outputs]
        return dict(zip(names, interpret(graph, given), strict=True))

    wanted = run(whole)
    found = run(first)
    saved |= found
    found |= run(second)
    for name, value in wanted.items():
        assert torch.equal(found[name].nan_to_num(), value.nan_to_num()), name


@pytest.mark.parametrize("name", ["llama", "t5", "resnet", "mixtral", "whisper"])
def test_the_halves_of_every_stage(name: str) -> None:
    case = MODELS[name]
    recording = record(case.model(), (), case.batch(2))
    lowered = make_plan(recording, Strategy().on(Mesh(pp=STAGES), micro_batches=1), NOMINAL_CPU)
    sent: dict[str, torch.Tensor] = {}
    for stage in range(STAGES):
        chunk = lowered.stage_graphs(stage, 0)
        assert chunk.backward is not None
        _check_stage(chunk, sent)
        first, second = split_backward(chunk)
        assert _products(second)
        frozen = tuple(
            replace(i, requires_grad=i.kind is InputKind.ACTIVATION and i.requires_grad)
            for i in lowered.stages.graphs[stage].inputs
        )
        only_inputs = differentiate(replace(lowered.stages.graphs[stage], inputs=frozen))
        assert _products(first) == _products(only_inputs.backward)
        kept = {o.name for o in first.outputs}
        passed = sum(i.spec.size_bytes for i in second.inputs if i.target in kept)
        held_bytes = order_bytes(chunk, (ActionKind.FORWARD, ActionKind.BACKWARD))[0].held_bytes
        assert passed <= 2 * held_bytes
        assert live_bytes(first).peak_bytes <= live_bytes(chunk.backward).peak_bytes + passed


def test_the_two_gradients_of_a_convolution_are_apart() -> None:
    model = Small(
        lambda s, x: s.layer(s.scale * x).square().sum(),
        layer=torch.nn.Conv1d(3, 4, 2),
        scale=torch.nn.Parameter(torch.ones(3, 8)),
    )
    graph = record(model, (torch.ones(2, 3, 8),), {}).graph
    arrived = tuple(
        replace(i, kind=InputKind.ACTIVATION) if i.target == "scale" else i for i in graph.inputs
    )
    chunk = differentiate(replace(graph, inputs=arrived))
    _check_stage(chunk, {})
    first, second = split_backward(chunk)
    (inputs,) = [n for n in first.nodes if n.op == CONVOLUTION]
    (weights,) = [n for n in second.nodes if n.op == CONVOLUTION]
    assert inputs.args[-1] == (True, False, False)
    assert weights.args[-1] == (False, True, True)


@pytest.mark.parametrize("name", ["llama", "t5", "resnet", "mixtral"])
def test_less_waits_for_the_second_half(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Than where the first has nothing but what others wait for; and the second has all products of
    gradients of weights.
    """
    case = MODELS[name]
    recording = record(case.model(), (), case.batch(2))
    lowered = make_plan(recording, Strategy().on(Mesh(pp=STAGES), micro_batches=1), NOMINAL_CPU)
    chunks = [lowered.stage_graphs(stage, 0) for stage in range(1, STAGES)]

    def halves() -> list[tuple[int, int]]:
        found = []
        for chunk in chunks:
            first, second = split_backward(chunk)
            order = ActionKind.FORWARD, ActionKind.INPUT_GRAD, ActionKind.WEIGHT_GRAD
            split = replace(chunk, input_grad=first, weight_grad=second)
            held_bytes = order_bytes(split, order, later=True)[1].held_bytes
            found.append((held_bytes, _products(second)))
        return found

    held = halves()
    monkeypatch.setattr("merakc.passes.autodiff.split_backward._at_once", lambda *_: set())
    for (held_bytes, products), (most_bytes, all_products) in zip(
        held, most := halves(), strict=True
    ):
        assert products == all_products > 0
        assert held_bytes <= most_bytes
    assert name == "resnet" or held != most


def test_the_gradient_of_a_norms_weight_is_made_at_once() -> None:
    rows, weight = TensorSpec((64, 8), torch.float64), TensorSpec((8,), torch.float64)
    x = Input("x", InputKind.ACTIVATION, rows, "x", True)
    inputs = [
        Input("w", InputKind.PARAMETER, weight, "w", True),
        Input("a", InputKind.PARAMETER, TensorSpec((8, 8), torch.float64), "a", True),
    ]
    nodes = (
        Node("n", "aten.mul.Tensor", (Ref("x"), Ref("w")), (), (rows,)),
        Node("p", "aten.mm.default", (Ref("n"), Ref("a")), (), (rows,)),
    )
    graph = Graph((x, *inputs), nodes, (Output("p", OutputKind.ACTIVATION, Ref("p")),))
    chunk = differentiate(graph)
    _check_stage(chunk, {})
    _, second = split_backward(chunk)
    assert [n.op for n in second.nodes if n.op.startswith("aten.mm")] == ["aten.mm.default"]
    assert not any(n.op.startswith("aten.sum") for n in second.nodes)
    assert {o.name for o in second.outputs} == {"w", "a"}
