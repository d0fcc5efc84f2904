"""Factors through whole forwards: heads, groups and packed projections come from the graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from merakc.frontend.record import record
from merakc.ir.graph import Ref
from merakc.passes.sharding.dims import Dims
from merakc.passes.sharding.factors import leaves
from merakc.passes.sharding.propagate import copies, propagate
from tests.passes.whole_models import eager


def dims_of(model: nn.Module, **batch: Any) -> Dims:
    return propagate(record(model, (), batch).graph)


def factors(dims: Dims, parameter: str) -> list[list[tuple[int, bool]]]:
    """Size and freedom of each factor of each dim of a parameter."""
    name = next(i.name for i in dims.graph.inputs if i.target == parameter)
    return [[(f.size, not f.blocked) for f in leaves(dim)] for dim in dims.of[Ref(name)]]


def test_packed_heads_of_gpt2() -> None:
    dims = propagate(eager("gpt2").recording.graph)
    weight = factors(dims, "transformer.h.1.attn.c_attn.weight")
    assert weight[1] == [(3, False), (4, True), (8, False)]
    assert factors(dims, "transformer.wte.weight")[0] == [(131, True)]


def test_grouped_heads_of_llama_meet_in_one_factor() -> None:
    dims = propagate(eager("llama").recording.graph)
    groups = {
        leaves(dims.of[Ref(i.name)][0])[0]
        for i in dims.graph.inputs
        if i.target.startswith("model.layers.0.self_attn") and "o_proj" not in i.target
    }
    assert len(groups) == 1
    assert groups.pop().size == 2


def test_batch_dims_are_whole() -> None:
    dims = propagate(eager("gpt2").recording.graph)
    assert all(
        f.blocked == "a dim of the batch" or "batch" in f.blocked
        for i in dims.graph.inputs
        if i.kind == "batch"
        for dim in dims.of[Ref(i.name)]
        for f in leaves(dim)
    )


class Unknown(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.last(torch.renorm(self.first(x), 2, 0, 1.0)).sum()}


def test_an_op_without_a_row_is_whole_and_named() -> None:
    dims = dims_of(Unknown(), x=torch.randn(4, 6))
    assert [n.op for n in dims.opaque] == ["aten.renorm.default"]
    assert factors(dims, "first.weight") == [[(8, False)], [(6, False)]]
    why = leaves(
        dims.of[Ref(next(i.name for i in dims.graph.inputs if i.target == "first.bias"))][0]
    )
    assert why[0].blocked.startswith("aten.renorm.default at ")
    assert "test_propagate.py" in why[0].blocked


def test_a_copy_of_the_batch_may_be_of_a_part() -> None:
    graph = record(Columns(), (), {"x": torch.ones(2, 6)}).graph
    dims = propagate(graph)
    (copy,) = copies(graph)
    assert factors(dims, "layer.weight")[1] == [(6, True)]
    assert leaves(dims.of[Ref("x")][1])[0].blocked == "a dim of the batch"
    assert leaves(dims.of[Ref(copy)][1]) == leaves(dims.of[Ref("layer.weight")][1])


class Columns(nn.Module):
    """Multiplies a copy of its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Of `[n, 6]`."""
        y: Tensor = self.layer(x.clone())
        return y.square().sum()
