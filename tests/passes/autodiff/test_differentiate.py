"""Chunks against eager: loss and every gradient of whole models, bit for bit or nearly."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.models import MODELS
from merakc.equality.casts import lifted_casts
from merakc.errors import RecordError
from merakc.frontend.record import record
from merakc.ir.graph import Graph, Input, InputKind, Node, Output, OutputKind, Ref, TensorSpec
from merakc.ir.program import StageGraphs
from merakc.passes.autodiff.interpret import interpret
from merakc.passes.autodiff.split_backward import split_backward
from merakc.passes.pipeline import differentiate
from tests.frontend.against_eager import backward_inputs, check, inputs_of
from tests.frontend.small import Small, linear, randn

F64 = torch.float64
SPEC = TensorSpec((4,), F64)


@pytest.mark.parametrize("name", MODELS)
def test_models_equal_eager(name: str) -> None:
    case = MODELS[name]
    with lifted_casts():
        # BatchNorm's statistics are computed by other kernels than its normalisation, and how the
        # product of an expert's few rows is rounded depends on where in memory they are.
        relative = 1e-14 if case.running_statistics or name == "mixtral" else 0.0
        check(case.model(F64), **case.batch(2, F64), relative=relative)


def _chunk(*, trained: bool = True, detached: bool = False) -> StageGraphs:
    """A stage in the middle: (w * x).sum kept, and passed on to a later stage."""
    x = Input("x", InputKind.ACTIVATION, SPEC, "x", True)
    w = Input("w", InputKind.PARAMETER, SPEC, "weight", trained)
    nodes = [Node("y", "aten.mul.Tensor", (Ref("w"), Ref("x")), (), (SPEC,))]
    if detached:
        nodes.append(Node("d", "aten.detach.default", (Ref("y"),), (), (SPEC,)))
    out = Output("y", OutputKind.ACTIVATION, Ref(nodes[-1].name))
    return differentiate(Graph((x, w), tuple(nodes), (out,)))


def test_a_stage_is_given_tangents_and_gives_the_gradients_of_what_it_received() -> None:
    chunk = _chunk()
    assert chunk.backward is not None
    w, x, tangent = (torch.randn(4, dtype=F64) for _ in range(3))
    values = {"w": w, "x": x, "tangent:y": tangent}
    given = {i.name: values[i.name] for i in chunk.backward.inputs}
    found = interpret(chunk.backward, given)
    gradients = dict(zip([o.name for o in chunk.backward.outputs], found, strict=True))
    assert torch.equal(gradients["w"], tangent * x)
    assert torch.equal(gradients["x"], tangent * w)


class _Forgetful(torch.autograd.Function):
    """Has a gradient for one of its two arguments."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        (x,) = ctx.saved_tensors
        return None, grad * x


def test_what_was_received_has_a_gradient_be_it_of_nothing() -> None:
    model = Small(lambda s, x: _Forgetful.apply(x, s.w).sum(), w=nn.Parameter(randn(4)))
    graph = record(model, (randn(4),), {}).graph
    inputs = [
        replace(i, kind=InputKind.ACTIVATION, requires_grad=True)
        if i.kind is InputKind.BATCH else i for i in graph.inputs
    ]  # fmt: skip
    chunk = differentiate(replace(graph, inputs=tuple(inputs)))
    assert chunk.backward is not None
    given = {i.name: torch.ones(i.spec.shape, dtype=F64) for i in chunk.backward.inputs}
    found = dict(zip([o.name for o in chunk.backward.outputs], interpret(chunk.backward, given),
                     strict=True))  # fmt: skip
    (received,) = [i.name for i in inputs if i.kind is InputKind.ACTIVATION]
    assert torch.equal(found[received], torch.zeros(4, dtype=F64))


def test_a_frozen_parameter_has_no_gradient() -> None:
    chunk = _chunk(trained=False)
    assert chunk.backward is not None
    assert [o.name for o in chunk.backward.outputs] == ["x"]


def test_where_nothing_reaches_the_outputs_there_is_no_backward() -> None:
    assert _chunk(detached=True).backward is None


def test_a_parameter_that_does_not_reach_the_loss_has_no_gradient() -> None:
    model = Small(lambda m, x: m.a(x).sum() + m.b(x).detach().sum(), a=linear(), b=linear())
    check(model, randn(2, 6))


class _Doubled(torch.autograd.Function):
    """Its backward is not its derivative."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return grad * 7


def test_a_custom_function_keeps_its_own_backward() -> None:
    check(Small(lambda m, x: _Doubled.apply(m.a(x)).sum(), a=linear()), randn(2, 6))


def test_the_forward_makes_nothing_that_only_the_backward_could_make_alone() -> None:
    """The transposed weight is made again in the backward, not kept from the forward."""
    model = nn.Sequential(linear(), nn.Tanh(), linear())
    recording = record(Small(lambda m, x: m.a(x).sum(), a=model), (randn(2, 6),), {})
    chunk = differentiate(recording.graph)
    saved = [o for o in chunk.forward.outputs if o.kind is OutputKind.SAVED]
    assert len(saved) == 1  # what tanh gave
    assert chunk.backward is not None
    read = {i.target for i in chunk.backward.inputs if i.kind is InputKind.PARAMETER}
    assert read == {"a.2.weight"}


@pytest.mark.parametrize("name", ["gpt2", "t5", "resnet"])
def test_the_two_halves_of_a_backward_equal_the_whole(name: str) -> None:
    """The whole model with its first activation cut off, so that both halves have work."""
    case = MODELS[name]
    model, batch = case.model(F64), case.batch(2, F64)
    with lifted_casts():
        graph = record(model, (), batch).graph
    values = inputs_of(graph, model, (), batch)
    first = next(i for i in graph.inputs if i.kind is InputKind.PARAMETER)
    inputs = tuple(
        Input(i.name, InputKind.ACTIVATION, i.spec, i.target, True) if i is first else i
        for i in graph.inputs
    )
    chunk = differentiate(Graph(inputs, graph.nodes, graph.outputs, graph.constants))
    assert chunk.backward is not None
    with torch.no_grad():
        outs = interpret(chunk.forward, values)
        saved = dict(zip([o.name for o in chunk.forward.outputs], outs, strict=True))
        whole = interpret(chunk.backward, backward_inputs(chunk.backward, values, saved))
        wanted = dict(zip([o.name for o in chunk.backward.outputs], whole, strict=True))
        found: dict[str, Tensor] = {}
        for part in split_backward(chunk):
            given = backward_inputs(part, values, saved)
            for out, value in zip(part.outputs, interpret(part, given), strict=True):
                (saved if out.kind is OutputKind.SAVED else found)[out.name] = value
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        assert torch.equal(found[key], value), key


def test_an_autocast_region_around_the_compiler_changes_nothing() -> None:
    graph = record(
        Small(lambda m, x: m.a(x).sum(), a=nn.Linear(6, 6)), (torch.ones(2, 6),), {}
    ).graph
    wanted = differentiate(graph)
    with torch.autocast("cpu", torch.bfloat16):
        found = differentiate(graph)
    assert str(found.forward) == str(wanted.forward)
    assert str(found.backward) == str(wanted.backward)


def test_backward_formulas_that_write_in_place_are_made_pure() -> None:
    """torch computes the backward of rfft by writing into a slice of zeros."""
    model = Small(lambda m, x: torch.fft.rfft(m.a(x)).abs().square().sum(), a=linear())
    graph = check(model, randn(2, 6), relative=1e-13).graph
    backward = differentiate(graph).backward
    assert backward is not None
    assert all(not n.op.split(".")[1].endswith("_") for n in backward.nodes)


def test_a_parameter_that_only_a_backward_reads_is_refused() -> None:
    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, module: nn.Module) -> torch.Tensor:
            ctx.module = module
            return x * 2

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> Any:
            return grads[0] * ctx.module.weight.sum(), None

    model = Small(lambda s, x: Keeps.apply(s.layer(x), s.layer).sum(), layer=linear())
    graph = record(model, (randn(4, 6),), {}).graph
    with pytest.raises(RecordError, match=r"reads a parameter of shape \(6, 6\) that apply\(\)"):
        differentiate(graph)


def test_a_backward_that_fails_is_named() -> None:
    class Rigid(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.sum(0)

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> Any:
            return grads[0].expand(8, 6)

    model = Small(lambda s, x: Rigid.apply(s.layer(x)).sum(), layer=linear())
    graph = record(model, (randn(4, 6),), {}).graph
    with pytest.raises(
        RecordError, match=r"(?s)backward .* fails: .*invalid gradient.*custom funct"
    ):
        differentiate(graph)


class _Counts(torch.autograd.Function):
    steps = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        _Counts.steps += 1
        return grads[0] * _Counts.steps


_NUMBERS = iter(range(1, 99))


class _Advances(_Counts):
    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * next(_NUMBERS)


class _Reads(_Counts):
    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * float(grads[0].norm())


class _Grows(torch.autograd.Function):
    """Lists that it is given are made anew at each call: a second backward is like the first."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, given: list[int]) -> Tensor:
        ctx.given = given
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.given.append(1)
        return grads[0] * len(ctx.given), None


def test_a_backward_that_changes_a_list_that_it_is_given_is_refused() -> None:
    model = Small(lambda s, x: _Grows.apply(s.layer(x), [1]).sum(), layer=linear())
    graph = record(model, (randn(4, 6),), {}).graph
    with pytest.raises(RecordError, match="backward of custom function _Grows changes a list"):
        differentiate(graph)


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (_Counts, r"every forward changes '_Counts.steps'"),
        (_Advances, r"every forward changes|_Advances\) computes something else in its second"),
        (_Reads, r"\(_Reads\) reads values of its tensors"),
    ],
)
def test_backwards_that_are_another_each_time_are_refused(cls: Any, message: str) -> None:
    model = Small(lambda s, x: cls.apply(s.layer(x)).sum(), layer=linear())
    graph = record(model, (randn(4, 6),), {}).graph
    with pytest.raises(RecordError, match=message):
        differentiate(graph)
    assert _Counts.steps == 0


class _Writes(torch.autograd.Function):
    """Writes to the gradient that it is given, and to what it is told to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, told: Tensor | None) -> Tensor:
        ctx.told = told
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        if ctx.told is not None:
            ctx.told.add_(grads[0].sum())
        return grads[0].mul_(3), None


def test_a_backward_that_writes_to_a_buffer_is_refused() -> None:
    model = Small(lambda s, x: _Writes.apply(s.layer(x), s.seen).sum(), layer=linear())
    model.register_buffer("seen", torch.zeros((), dtype=torch.float64))
    graph = record(model, (randn(4, 6),), {}).graph
    with pytest.raises(
        RecordError, match=r"test_diff.*: the backward .*_Writes\) writes to 'seen'"
    ):
        differentiate(graph)
    assert model.seen == 0


def test_a_backward_may_write_to_the_gradient_of_the_loss() -> None:
    model = Small(lambda s, x: _Writes.apply(s.layer(x).sum(), None), layer=linear())
    check(model, randn(4, 6))
