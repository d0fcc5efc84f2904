from __future__ import annotations

from typing import Literal

import pytest
import torch
import torch.distributed as dist

from benchmarks.ranks import run_ranks
from merakc.ir.graph import Graph, Input, InputKind, Node, Output, OutputKind, Ref, TensorSpec
from merakc.ir.program import Action, ActionKind, Mesh, StageGraphs, Transfer
from merakc.passes.autodiff.recompute import checkpointed
from merakc.passes.programs.schedule import build_programs
from merakc.runtime.executor import Executor
from merakc.runtime.groups import Groups
from merakc.schedules.registry import make_schedule

CPU = torch.device("cpu")
SPEC = TensorSpec((3,), torch.float64)
SCALAR = TensorSpec((), torch.float64)
MUL, SUM, EXPAND = "aten.mul.Tensor", "aten.sum.default", "aten.expand.default"
MICRO_BATCHES = 4


def node(name: str, op: str, *args: object, spec: TensorSpec = SPEC) -> Node:
    return Node(name, op, args, (), (spec,))


def first_stage() -> StageGraphs:
    """y = w x, and its gradient by w."""
    x, w = Input("x", InputKind.BATCH, SPEC, "x"), Input("w", InputKind.PARAMETER, SPEC, "w")
    forward = Graph(
        (x, w),
        (node("mul", MUL, Ref("x"), Ref("w")),),
        (Output("y", OutputKind.ACTIVATION, Ref("mul")),),
    )
    backward = Graph(
        (x, Input("t", InputKind.TANGENT, SPEC, "y")),
        (node("dw", MUL, Ref("x"), Ref("t")),),
        (Output("w", OutputKind.GRADIENT, Ref("dw")),),
    )
    return StageGraphs(forward, backward)


def last_stage(name: str = "y") -> StageGraphs:
    """loss = sum(v y), its gradients by v and y; y is an input of the backward too."""
    y = Input(name, InputKind.ACTIVATION, SPEC, name, True)
    v = Input("v", InputKind.PARAMETER, SPEC, "v", True)
    forward = Graph(
        (y, v),
        (node("vy", MUL, Ref(name), Ref("v")), node("sum", SUM, Ref("vy"), spec=SCALAR)),
        (Output("loss", OutputKind.LOSS, Ref("sum")), Output("vy", OutputKind.RESULT, Ref("vy"))),
    )
    backward = Graph(
        (y, v, Input("t", InputKind.TANGENT, SCALAR, "loss")),
        (
            node("g", EXPAND, Ref("t"), (3,)),
            node("dv", MUL, Ref("g"), Ref(name)),
            node("dy", MUL, Ref("g"), Ref("v")),
        ),
        (Output("v", OutputKind.GRADIENT, Ref("dv")), Output(name, OutputKind.GRADIENT, Ref("dy"))),
    )
    return StageGraphs(forward, backward)


def batches() -> list[dict[str, torch.Tensor]]:
    return [{"x": torch.arange(3.0).double() + k} for k in range(MICRO_BATCHES)]


W, V = torch.tensor([1.0, 2.0, 3.0]).double(), torch.tensor([0.5, -1.0, 2.0]).double()


def two_stages(schedule: str, recompute: Literal["none", "full"]) -> dict[str, object]:
    rank, mesh = dist.get_rank(), Mesh(pp=2)
    groups = Groups(mesh, rank)
    program = build_programs(
        mesh,
        make_schedule(schedule, 2, MICRO_BATCHES, recompute=recompute),
        [Transfer("y", 0, 1, 24, True)],
    )[rank]
    reduced: list[int] = []
    executor = Executor(
        program, {rank: checkpointed([first_stage, last_stage][rank](), ())},
        [{"w": W}, {"v": V}][rank], CPU, reduce=lambda grads: reduced.append(len(grads)),
        channels=groups.channels([(0, 1, False), (1, 0, True)]),
    )  # fmt: skip
    executor.run(batches())
    result = executor.run(batches())
    assert reduced == [1, 1]
    labels = [event.label for event in result.events]
    return {"result": result, "labels": labels}


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_two_stages(schedule: str, recompute: Literal["none", "full"]) -> None:
    first, last = run_ranks(2, two_stages, schedule, recompute)
    x = torch.stack([b["x"] for b in batches()])
    w, v = W.clone().requires_grad_(), V.clone().requires_grad_()
    (w * v * x).sum().backward()
    assert first["result"].loss is None
    torch.testing.assert_close(last["result"].loss, (W * V * x).sum())
    torch.testing.assert_close(first["result"].gradients, {"w": w.grad})
    torch.testing.assert_close(last["result"].gradients, {"v": v.grad})
    for k, result in enumerate(last["result"].results):
        torch.testing.assert_close(result["vy"], W * V * x[k])
    assert first["labels"][-1] == "reduce 0"
    computed = [label for label in first["labels"] if label[0] == "0" and label[1] != "R"]
    assert sum("R" in label for label in first["labels"]) == (
        MICRO_BATCHES if recompute == "full" else 0
    )
    if schedule == "gpipe":
        assert computed == ["0F0", "0F1", "0F2", "0F3", "0B0", "0B1", "0B2", "0B3"]
    else:
        assert computed == ["0F0", "0F1", "0B0", "0F2", "0B1", "0F3", "0B2", "0B3"]


def skipping_stages() -> dict[str, torch.Tensor]:
    """Stage 0 sends one value to stages 1 and 2, whose gradients for it are added."""
    rank, mesh = dist.get_rank(), Mesh(pp=3)
    transfers = [Transfer("y", 0, 1, 24, True), Transfer("y", 0, 2, 24, True)]
    program = build_programs(mesh, make_schedule("1f1b", mesh.pp, MICRO_BATCHES), transfers)[rank]
    chunk = first_stage() if rank == 0 else last_stage()
    executor = Executor(program, {rank: chunk}, {"w": W, "v": V}, CPU)
    return executor.run(batches()).gradients


def test_a_value_that_several_stages_read() -> None:
    first, *_ = run_ranks(3, skipping_stages)
    x = torch.stack([b["x"] for b in batches()]).sum(0)
    torch.testing.assert_close(first["w"], 2 * V * x)


def undifferentiated() -> dict[str, torch.Tensor]:
    """Stage 1 reads the value and sends no gradient back."""
    rank, mesh = dist.get_rank(), Mesh(pp=2)
    program = build_programs(
        mesh, make_schedule("1f1b", mesh.pp, MICRO_BATCHES), [Transfer("y", 0, 1, 24, False)]
    )[rank]
    chunk = first_stage() if rank == 0 else StageGraphs(last_stage().forward, None)
    return Executor(program, {rank: chunk}, {"w": W, "v": V}, CPU).run(batches()).gradients


def test_a_value_that_is_not_differentiated_by_counts_nothing() -> None:
    first, last = run_ranks(2, undifferentiated)
    torch.testing.assert_close(first, {"w": torch.zeros(3).double()})
    assert last == {}


def alone(
    chunk: StageGraphs, state: dict[str, torch.Tensor], *, recompute: bool = False
) -> Executor:
    schedule = make_schedule("1f1b", 1, 2, recompute="full" if recompute else "none")
    program = build_programs(Mesh(), schedule, [])[0]
    return Executor(program, {0: checkpointed(chunk, ())}, state, CPU)


@pytest.mark.parametrize("recompute", [False, True])
def test_a_buffer_is_read_as_it_was_before_its_forward(recompute: bool) -> None:
    buffer = Input("b", InputKind.BUFFER, SPEC, "stats.b")
    v = Input("v", InputKind.PARAMETER, SPEC, "v", True)
    forward = Graph(
        (buffer, v),
        (
            node("bv", MUL, Ref("b"), Ref("v")),
            node("sum", SUM, Ref("bv"), spec=SCALAR),
            node("new", "aten.add.Tensor", Ref("b"), Ref("v")),
        ),
        (
            Output("loss", OutputKind.LOSS, Ref("sum")),
            Output("stats.b", OutputKind.BUFFER, Ref("new")),
            Output("%bv", OutputKind.SAVED, Ref("bv")),
        ),
    )
    backward = Graph(
        (buffer, v, Input("s", InputKind.SAVED, SPEC, "%bv")),
        (
            node("old", MUL, Ref("b"), Ref("v")),
            node("same", "aten.sub.Tensor", Ref("old"), Ref("s")),
            node("dv", "aten.add.Tensor", Ref("b"), Ref("same")),
        ),
        (Output("v", OutputKind.GRADIENT, Ref("dv")),),
    )
    state = {"stats.b": torch.ones(3).double(), "v": V.clone()}
    executor = alone(StageGraphs(forward, backward), state, recompute=recompute)
    found = executor.run([{}, {}])
    torch.testing.assert_close(found.gradients["v"], 1 + (1 + V))
    torch.testing.assert_close(state["stats.b"], 1 + 2 * V)


def test_gradients_share_no_memory_with_anything() -> None:
    x = Input("x", InputKind.BATCH, SPEC, "x")
    names = ("a", "b", "c", "d")
    parameters = tuple(Input(n, InputKind.PARAMETER, SPEC, n, True) for n in names)
    forward = Graph(
        (x, *parameters),
        (node("sum", SUM, Ref("x"), spec=SCALAR),),
        (Output("loss", OutputKind.LOSS, Ref("sum")),),
    )
    backward = Graph(
        (x, Input("t", InputKind.TANGENT, SCALAR, "loss")),
        (
            node("g", MUL, Ref("x"), Ref("t")),
            node("view", "aten.alias.default", Ref("g")),
            node("wide", EXPAND, Ref("t"), (3,)),
        ),
        tuple(
            Output(name, OutputKind.GRADIENT, Ref(ref))
            for name, ref in zip(names, ("g", "view", "wide", "x"), strict=True)
        ),
    )
    given = batches()[:2]
    kept = given[0]["x"].clone()
    executor = alone(StageGraphs(forward, backward), dict.fromkeys(names, V))
    piece = executor.stages[0].piece(ActionKind.BACKWARD, 0)
    assert piece is not None
    assert piece.owned == frozenset()  # each would be changed, or sent, under another's feet
    found = executor.run(given).gradients
    total = given[0]["x"] + given[1]["x"]
    for name, value in zip(
        names, (total, total, torch.full((3,), 2.0).double(), total), strict=True
    ):
        torch.testing.assert_close(found[name], value)
    assert len({g.data_ptr() for g in found.values()}) == 4
    assert torch.equal(given[0]["x"], kept)


def test_forward_only_keeps_nothing() -> None:
    program = build_programs(Mesh(), make_schedule("1f1b", 1, 2), [], forward_only=True)[0]
    assert {a.kind for a in program.actions} == {ActionKind.FORWARD}
    chunk = StageGraphs(last_stage().forward, None)
    result = Executor(program, {0: chunk}, {"v": V, "y": W}, CPU).run([{}, {}])
    torch.testing.assert_close(result.loss, 2 * (V * W).sum())
    assert result.gradients == {}
    assert [set(r) for r in result.results] == [{"vy"}] * 2


def test_events_are_in_order() -> None:
    chunk = last_stage()
    result = alone(chunk, {"v": V, "y": W}).run([{}, {}])
    times = [t for event in result.events for t in (event.start_s, event.end_s)]
    assert times == sorted(times)
    assert [str(Action(e.kind, 0))[:2] for e in result.events[:4]] == ["0F", "0B", "0F", "0B"]
