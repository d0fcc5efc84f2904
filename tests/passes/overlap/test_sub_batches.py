"""Micro-batches in parts against micro-batches whole, in one process."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from benchmarks.models import MODELS
from merakc.equality.casts import lifted_casts
from merakc.errors import PlanError
from merakc.ir.batches import BatchLayout
from merakc.ir.graph import Graph, InputKind, OutputKind
from merakc.ir.program import Mesh
from merakc.ir.strategy import Strategy
from merakc.kernels.draws import KEY_POSITION
from merakc.lowering.lowered import Lowered, make_plan
from merakc.lowering.overlap import with_parts
from merakc.machines.cluster import NOMINAL_CPU
from merakc.passes.autodiff.interpret import interpret
from merakc.passes.overlap.sub_batches import divided, make_parts
from tests.coupled_models import ROUTED
from tests.recorded import recorded

SAMPLES = 4


def in_parts(
    model: nn.Module, batch: dict[str, Tensor], count: int, pp: int = 1
) -> tuple[Lowered, Lowered]:
    """A micro-batch whole, and in parts."""
    with lifted_casts():
        whole = make_plan(
            recorded(model, batch, divided=True),
            Strategy().on(Mesh(1, 1, pp), micro_batches=1, batch_size=SAMPLES),
            NOMINAL_CPU,
        )
        plan = replace(whole.plan, sub_batches=(count,) * pp)
        made = with_parts(replace(whole, plan=plan), lambda parts: recorded(model, batch, parts))
    return whole, made


@cache
def model_in_parts(name: str, count: int, pp: int = 1) -> tuple[Lowered, Lowered]:
    case = MODELS[name]
    model = case.model(torch.float64, dropout=0.2)
    return in_parts(model, case.batch(SAMPLES, torch.float64), count, pp)


def known_of(lowered: Lowered, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """What is known of a batch of one micro-batch before its step."""
    known = lowered.loss.known
    if known is None:
        return {}
    own = interpret(known.part, {i.name: given[i.target] for i in known.part.inputs
                                 if i.name not in known.part.constants})  # fmt: skip
    shares = dict(zip([o.name for o in known.part.outputs], own, strict=True))
    names = [o.name for o in known.whole.graph.outputs]
    return dict(zip(names, interpret(known.whole.graph, shares), strict=True))


def run_stages(lowered: Lowered, graphs: list[Graph], name: str) -> Tensor:
    """The loss, of random weights and a first sample that is not 0."""
    case = MODELS[name]
    model, batch = case.model(torch.float64), case.batch(SAMPLES, torch.float64)
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    batch |= known_of(lowered, state | batch)
    scalars = {"seed": 11, "first_sample": 8}
    sent: dict[str, Tensor] = {}
    losses = []
    for graph in graphs:
        given: dict[str, Tensor] = {}
        for item in graph.inputs:
            if item.kind is InputKind.SCALAR:
                given[item.name] = torch.tensor(scalars[item.target]).to(item.spec.dtype)
            elif item.kind is InputKind.BATCH:
                given[item.name] = batch[item.target]
            elif item.kind is InputKind.ACTIVATION:
                given[item.name] = sent[item.name]
            elif item.name not in graph.constants:
                given[item.name] = state[item.target]
        with torch.no_grad():
            for out, value in zip(graph.outputs, interpret(graph, given), strict=True):
                if out.kind is OutputKind.LOSS:
                    losses.append(value)
                else:
                    sent[out.name] = value
    return torch.stack(losses).sum()


@pytest.mark.parametrize(
    ("name", "count", "pp"),
    [("gpt2", 4, 2), ("t5", 2, 2), ("bert", 4, 1), ("vit", 2, 2), ("mixtral", 2, 1)],
)
def test_parts_add_up_to_the_whole_and_draw_what_it_draws(name: str, count: int, pp: int) -> None:
    whole, made = model_in_parts(name, count, pp)
    assert made.parts[0].count == count
    assert made.parts[0].samples == SAMPLES // count
    graphs = [made.local(stage, 0) for stage in range(pp)]
    wanted = run_stages(whole, list(whole.stages.graphs), name)
    torch.testing.assert_close(run_stages(whole, graphs, name), wanted, rtol=1e-13, atol=0)


def test_other_stages_see_nothing_of_it() -> None:
    whole, made = model_in_parts("t5", 2, 2)
    for stage in range(2):
        before, after = whole.stages.graphs[stage], made.local(stage, 0)
        outside = {i.name: i for i in before.inputs if i.kind is not InputKind.CONSTANT}
        assert outside == {i.name: i for i in after.inputs if i.kind is not InputKind.CONSTANT}
        specs, wanted = after.specs(), before.specs()
        assert [(o.name, o.kind, specs[o.ref]) for o in after.outputs] == [
            (o.name, o.kind, wanted[o.ref]) for o in before.outputs
        ]


def test_what_no_sample_is_in_is_computed_once() -> None:
    whole, made = model_in_parts("t5", 2)
    names = {n.name for n in made.local(0, 0).nodes}
    before = whole.stages.graphs[0].nodes
    once = [n for n in before if n.name in names]
    assert any("bucket" in n.source or "relative" in n.module for n in once) or once
    assert all(f"{n.name}@0" in names and f"{n.name}@1" in names for n in before if n not in once)
    products = [n.name for n in before if n.op == "aten.linear.default"]
    assert all(f"{name}@1" in names for name in products)


def test_each_part_draws_by_the_number_of_its_first_sample() -> None:
    _, made = model_in_parts("gpt2", 4)
    graph = made.local(0, 0)
    adds = {n.name: n.args[1] for n in graph.nodes if n.name.startswith("first_sample@")}
    assert list(adds.values()) == [1, 2, 3]
    draws = [n for n in graph.nodes if n.op in KEY_POSITION]
    for node in draws:
        part = int(node.name.rpartition("@")[2])
        assert node.args[2].node == (f"first_sample@{part}" if part else "first_sample")


def test_the_graph_of_a_part_that_reads_otherwise_is_refused() -> None:
    whole, made = model_in_parts("gpt2", 2)
    (parts,) = made.parts
    local, part = whole.stages.graphs[0], parts.stages.graphs[0]
    first = part.inputs[0].name
    with pytest.raises(PlanError, match=rf"in 2 parts: .* reads parameter {first} .* overlap=1"):
        divided(replace(local, inputs=local.inputs[1:]), part, parts)
    with pytest.raises(PlanError, match=f"does not read {first}"):
        divided(local, replace(part, inputs=part.inputs[1:]), parts)
    with pytest.raises(PlanError, match="does not divide into equal parts"):
        make_parts(whole.loss.graph, whole.stages, whole.loss.graph, whole.stages, {})


def test_a_value_of_which_ranks_hold_other_samples_is_refused() -> None:
    """Where tp splits the samples, a rank's share of the whole is as large as a part."""
    whole, made = model_in_parts("gpt2", 2, pp=2)
    local, part = whole.stages.graphs[1], made.parts[0].stages.graphs[1]
    specs = {i.name: i.spec for i in part.inputs}
    alike = tuple(replace(i, spec=specs[i.name]) for i in local.inputs)
    with pytest.raises(PlanError, match="in 2 parts: the graph of a part reads act:"):
        divided(replace(local, inputs=alike), part, made.parts[0])


def test_a_buffer_that_the_forward_writes_is_refused() -> None:
    _, made = model_in_parts("resnet", 2)
    with pytest.raises(PlanError, match="makes no buffer"):
        made.local(0, 0)


class Pooled(nn.Module):
    """Its middle has no dim of samples, though all are in it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """A mean over the samples, between two layers."""
        return {"loss": self.second(self.first(x).mean(0)).square().mean()}


def test_a_value_between_stages_without_a_dim_of_samples_is_refused() -> None:
    # The whole batch's mean is what follows is coupled by: a part of it stops before.
    _, made = in_parts(Pooled(), {"x": torch.randn(SAMPLES, 6)}, 2, pp=2)
    with pytest.raises(PlanError, match="cannot be run in 2 parts"):
        made.local(0, 0)


class Turned(nn.Module):
    """Keeps its samples in dim 1, behind the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """The mean square of what four layers make of [samples, 3, 6]."""
        x = x.transpose(0, 1)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return {"loss": x.square().mean()}


def test_samples_may_stand_in_any_dim() -> None:
    _, made = in_parts(Turned(), {"x": torch.randn(SAMPLES, 3, 6)}, 2, pp=2)
    assert set(made.parts[0].sample_dims.values()) == {1}
    joins = [n for n in made.local(0, 0).nodes if n.op == "aten.cat.default"]
    assert [n.args[1] for n in joins] == [1]


def test_a_stage_that_hands_values_to_the_head_runs_whole() -> None:
    def planned(parts: int) -> Lowered:
        recording = ROUTED.record(BatchLayout((8,), parts))
        return make_plan(recording, Strategy().on(Mesh(1, 1, 1), micro_batches=parts), NOMINAL_CPU)

    whole, part = planned(2), planned(4)
    parts = make_parts(whole.loss.graph, whole.stages, part.loss.graph, part.stages, {})
    with pytest.raises(PlanError, match=r"makes no waist share\..* give overlap=1"):
        divided(whole.stages.local[0], part.stages.local[0], parts)
