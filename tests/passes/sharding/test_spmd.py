"""Whole models: the ranks' graphs together compute what one process does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from merakc.errors import ShardError
from merakc.ir.graph import Graph, Input, InputKind, Node, Output, OutputKind, Ref, TensorSpec
from merakc.ir.layout import DimFactor, Layout
from merakc.lowering.lowered import training_graph
from merakc.passes.autodiff.interpret import interpret
from merakc.passes.sharding.layouts import Sharding
from merakc.passes.sharding.shard import shard
from merakc.passes.sharding.spmd import spmd_partition
from tests.passes.lockstep import in_lockstep
from tests.passes.whole_models import compare, eager, run_eager, run_sharded

MODELS = (
    "gpt2", "llama", "qwen2", "t5", "bart", "whisper", "bert", "vit", "transformer_encoder",
    "resnet", "gpt_neox", "opt", "mixtral",
)  # fmt: skip


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("tp", [2, 3, 4])
@pytest.mark.parametrize("name", MODELS)
def test_all_ranks_equal_one_process(name: str, tp: int, sequence_parallel: bool) -> None:
    case = eager(name)
    graph = training_graph(case.recording.graph)
    sharding = shard(graph, tp, sequence_parallel=sequence_parallel)
    assert sharding.splits(graph)
    assert bool(sharding.sequences) == sequence_parallel
    compare(case, *run_sharded(case, (graph,), sharding))


class Packed(nn.Module):
    """Queries, keys and values from one projection, grouped heads, cut in unequal parts."""

    def __init__(self, sliced: bool) -> None:
        super().__init__()
        self.sliced = sliced
        self.packed, self.out = nn.Linear(8, 6 * 4 + 2 * 3 * 4), nn.Linear(6 * 4, 8)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        qkv = self.packed(x)
        if self.sliced:
            parts = qkv[..., :24], qkv[..., 24:36], qkv[..., -12:]
        else:
            parts = torch.split(qkv, [24, 12, 12], -1)
        q, k, v = (p.unflatten(-1, (-1, 4)).transpose(1, 2) for p in parts)
        y = nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return {"loss": self.out(y.transpose(1, 2).flatten(2)).square().sum()}


@pytest.mark.parametrize("sliced", [True, False])
@pytest.mark.parametrize("tp", [2, 3])
def test_parts_of_unequal_size_are_split_each_on_its_own(tp: int, sliced: bool) -> None:
    torch.manual_seed(0)
    case = run_eager(Packed(sliced).double(), {"x": torch.randn(2, 5, 8, dtype=torch.float64)})
    graph = training_graph(case.recording.graph)
    sharding = shard(graph, tp)
    split = sharding.splits(graph)
    assert str(split["packed.weight"]) == "(3*·8+3*·4+3*·4) x 8"
    assert str(split["out.weight"]) == "8 x 3*·8"
    assert shard(graph, tp, split) == sharding
    compare(case, *run_sharded(case, (graph,), sharding))


def test_parts_that_are_not_all_split_stay_whole() -> None:
    class Half(nn.Module):
        """Only the first part is a hidden layer; the other goes through a norm."""

        def __init__(self) -> None:
            super().__init__()
            self.both, self.out = nn.Linear(8, 20), nn.Linear(12, 8)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            hidden, other = torch.split(self.both(x), [12, 8], -1)
            other = nn.functional.layer_norm(other, (8,))
            return {"loss": (self.out(hidden.relu()) * other).square().sum()}

    case = run_eager(Half().double(), {"x": torch.randn(4, 8, dtype=torch.float64)})
    graph = training_graph(case.recording.graph)
    with pytest.raises(ShardError, match="use tp=1"):
        shard(graph, 2)


@pytest.mark.parametrize("tp", [2, 3])
def test_ranks_copy_their_parts_of_the_batch(tp: int) -> None:
    class Gated(nn.Module):
        """Of which hidden units are multiplied by what the batch brings."""

        def __init__(self) -> None:
            super().__init__()
            self.into, self.out = nn.Linear(8, 12), nn.Linear(12, 8)

        def forward(self, x: Tensor, gates: Tensor) -> dict[str, Tensor]:
            return {"loss": self.out(self.into(x) * gates.clone()).square().sum()}

    given = {"x": torch.randn(4, 8).double(), "gates": torch.randn(4, 12).double()}
    case = run_eager(Gated().double(), given)
    graph = training_graph(case.recording.graph)
    sharding = shard(graph, tp)
    assert sharding.splits(graph).keys() == {"into.weight", "into.bias", "out.weight"}
    assert sharding.layouts[Ref("gates")].local_shape(tp, 0) == (4, 12)
    compare(case, *run_sharded(case, (graph,), sharding))


def test_without_splits_the_graph_is_the_same() -> None:
    graph = training_graph(eager("gpt2").recording.graph)
    assert spmd_partition(graph, shard(graph, 1), 0) is graph


def test_results_are_gathered_in_the_full_tensors_order() -> None:
    spec = TensorSpec((2, 12), torch.float32)
    graph = Graph(
        (Input("x", InputKind.PARAMETER, spec, "x"),),
        (Node("y", "aten.neg.default", (Ref("x"),), (), (spec,)),),
        (Output("y", OutputKind.RESULT, Ref("y")),),
    )
    lay = Layout(((DimFactor(2),), (DimFactor(2), DimFactor(3, True), DimFactor(2))))
    sharding = Sharding(2, {Ref("x"): lay, Ref("y"): lay}, frozenset(), ())
    full = torch.arange(24.0).reshape(2, 12)

    def rank(r: int) -> torch.Tensor:
        found: torch.Tensor = interpret(
            spmd_partition(graph, sharding, r), {"x": lay.take(full, 2, r)}
        )[0]
        return found

    for found in in_lockstep(2, rank):
        assert torch.equal(found, -full)
