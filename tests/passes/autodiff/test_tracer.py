"""The tracer against torch's own: the same graphs to the letter, and what is left to that one."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from merakc.frontend.record import record
from merakc.ir.graph import Ref
from merakc.lowering.lowered import training_graph
from merakc.passes.autodiff import by_call
from merakc.passes.autodiff import differentiate as module
from merakc.passes.autodiff.tracer import Tracer
from merakc.passes.pipeline import differentiate
from tests.frontend.small import Small, linear, randn
from tests.passes.whole_models import eager


class Blind(Tracer):
    """One that never can."""

    @property  # type: ignore[misc]
    def unclear(self) -> str:
        return "never"

    @unclear.setter
    def unclear(self, _: str) -> None: ...


@pytest.mark.parametrize("name", ["llama", "t5", "resnet"])
def test_graphs_are_those_of_torchs_own_tracer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = training_graph(eager(name).recording.graph)
    asked: list[Any] = []
    theirs = module._traced
    monkeypatch.setattr(module, "_traced", lambda *args: asked.append(0) or theirs(*args))
    found = differentiate(graph)
    assert not asked
    for traces in (module, by_call):
        monkeypatch.setattr(traces, "Tracer", Blind)
    wanted = differentiate(graph)
    assert asked
    assert str(found.forward) == str(wanted.forward)
    assert str(found.backward) == str(wanted.backward)


def test_formulas_that_write_are_left_to_torchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward of rfft writes into a slice of zeros."""
    model = Small(lambda m, x: torch.fft.rfft(m.a(x)).abs().square().sum(), a=linear())
    graph = record(model, (randn(2, 6),), {}).graph
    asked: list[Any] = []
    theirs = module._traced
    monkeypatch.setattr(module, "_traced", lambda *args: asked.append(0) or theirs(*args))
    chunk = differentiate(graph)
    assert asked
    assert chunk.backward is not None
    assert not [n for n in chunk.backward.nodes if n.op.split(".")[1].endswith("_")]


def test_own_calls_need_no_fake_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = training_graph(eager("llama").recording.graph)
    wanted = str(differentiate(graph).backward)

    def refused(**_: Any) -> FakeTensorMode:
        raise AssertionError("fake tensors were made")

    monkeypatch.setattr(module, "new_fake_mode", refused)
    assert str(differentiate(graph).backward) == wanted


class _Placed(torch.autograd.Function):
    """Code that asks where its tensors are."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        assert x.device.type == "cpu"
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        assert grad.device.type == "cpu"
        return grad * 2


def test_functions_of_users_see_tensors_of_a_device_that_computes() -> None:
    model = Small(lambda m, x: _Placed.apply(m.a(x)).sum(), a=linear())
    graph = record(model, (randn(2, 6),), {}).graph
    assert differentiate(graph).backward is not None


def test_equal_layers_are_each_written_down() -> None:
    tracer, _ = traced(lambda x: ((x * 2).exp() * 2).exp(), on="meta")
    assert [str(n) for n in tracer.nodes] == [
        "%j:mul: float32[2,3] = aten.mul.Tensor(%x, 2)",
        "%j:exp: float32[2,3] = aten.exp.default(%j:mul)",
        "%j:mul_1: float32[2,3] = aten.mul.Tensor(%j:exp, 2)",
        "%j:exp_1: float32[2,3] = aten.exp.default(%j:mul_1)",
    ]


def traced(function: Any, shape: tuple[int, ...] = (2, 3), on: str = "cpu") -> tuple[Tracer, Any]:
    mode = nullcontext() if on == "meta" else FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        x = torch.empty(shape, device=on)
    tracer = Tracer({Ref("x"): x})
    with mode, tracer:
        out = function(x)
    return tracer, out


on_both = pytest.mark.parametrize("on", ["cpu", "meta"])


@on_both
def test_calls_are_written_down_in_order(on: str) -> None:
    tracer, out = traced(lambda x: torch.split(x.t() + x.t(), 2)[1].sum(), on=on)
    assert [str(n) for n in tracer.nodes] == [
        "%j:t: float32[3,2] = aten.t.default(%x)",
        "%j:t_1: float32[3,2] = aten.t.default(%x)",
        "%j:add: float32[3,2] = aten.add.Tensor(%j:t, %j:t_1)",
        "%j:split: float32[2,2], float32[1,2] = aten.split.Tensor(%j:add, 2)",
        "%j:sum_1: float32[] = aten.sum.default(%j:split:1)",
    ]
    assert tracer.ref(out) == Ref("j:sum_1")
    assert not tracer.unclear


@on_both
def test_real_tensors_are_constants(on: str) -> None:
    table = torch.arange(3.0)
    tracer, _ = traced(lambda x: torch.cat([(x + table) * table, table[None]]), on=on)
    (own,) = tracer.inputs
    assert tracer.constants == {own.name: table}
    assert [r for n in tracer.nodes for r in n.refs].count(Ref(own.name)) == 3


@on_both
def test_where_a_result_lives_is_not_written_down(on: str) -> None:
    tracer, out = traced(lambda x: torch.zeros(2, device="cpu") + x.sum(), on=on)
    (made,) = [n for n in tracer.nodes if "zeros" in n.op]
    assert dict(made.kwargs).keys() <= {"dtype"}
    assert out.device.type == on


@on_both
def test_what_is_written_to_a_new_value_is_returned(on: str) -> None:
    tracer, out = traced(lambda x: (x + 1).mul_(2) - x, on=on)
    assert not tracer.unclear
    assert [n.op for n in tracer.nodes] == ["aten.add.Tensor", "aten.mul.Tensor", "aten.sub.Tensor"]
    add, mul, sub = tracer.nodes
    assert mul.args == (Ref(add.name), 2)
    assert sub.args[0] == Ref(mul.name)
    assert tracer.ref(out) == Ref(sub.name)


TABLE = torch.ones(2, 3)


@on_both
@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.mul_(2),  # what was given
        lambda x: (x + 1)[0].mul_(2),  # a view
        lambda x: [y := x + 1, y.t(), y.mul_(2)][0],  # what has one
        lambda x: [y := x + 1, torch.ops.aten._unsafe_view(y, [6]), y.mul_(2)][0],
        lambda x: torch.ops.aten.unsafe_split(x + 1, 1)[0].mul_(2),
        lambda x: TABLE[0].mul_(x[0]),
        lambda x: torch.ops.aten._unsafe_view(TABLE, [2, 3]).mul_(x),
        lambda x: (x > 0).logical_and_(x < 1).view(torch.uint8).mul_(2),
        lambda x: (x + 1).half().mul_(x.sum(0)),  # the other op returns more bits
        lambda x: torch.add(x, 1, out=torch.empty_like(x)),
    ],
)
def test_what_writes_to_what_others_see_is_unclear(on: str, call: Any) -> None:
    tracer, _ = traced(call, on=on)
    assert "writes" in tracer.unclear


@pytest.mark.parametrize("by", [module, by_call])
def test_a_clamp_between_two_bounds_has_torchs_own_graph(
    by: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its backward writes to what it has compared."""
    model = Small(lambda m, x: m.a(x).clamp(-0.1, 0.1).square().sum(), a=linear())
    graph = record(model, (randn(2, 6),), {}).graph
    asked: list[Any] = []
    theirs = module._traced
    monkeypatch.setattr(module, "_traced", lambda *args: asked.append(0) or theirs(*args))
    if by is module:  # without a graph call by call
        monkeypatch.setattr(module, "_by_call", _unclear)
    found = differentiate(graph)
    assert not asked
    for traces in (module, by_call):
        monkeypatch.setattr(traces, "Tracer", Blind)
    wanted = differentiate(graph)
    assert asked
    assert str(found.backward) == str(wanted.backward)


def _unclear(*args: Any) -> Any:
    raise by_call.UnclearError("never")


@on_both
def test_a_value_from_nowhere_is_unclear(on: str) -> None:
    tracer, x = traced(lambda x: x, on=on)
    with x.fake_mode if on == "cpu" else nullcontext():
        other = torch.empty(2, 3, device=on)
    tracer.ref(other)
    assert "no call has made" in tracer.unclear
