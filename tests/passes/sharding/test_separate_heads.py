from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor, nn

from merakc.lowering.lowered import training_graph
from merakc.passes.sharding.separate_heads import separate_heads
from merakc.passes.sharding.shard import shard
from merakc.passes.sharding.spmd import spmd_partition
from tests.passes.whole_models import compare, eager, run_eager, run_sharded

WIDTH = 4


class Grouped(nn.Module):
    """Attention with fewer key and value heads than query heads; each group reads one."""

    def __init__(self, heads: int, groups: int, copied: bool) -> None:
        super().__init__()
        self.copied, self.repeats = copied, heads // groups
        self.q = nn.Linear(12, heads * WIDTH)
        self.k, self.v = (nn.Linear(12, groups * WIDTH, bias=False) for _ in range(2))
        self.out = nn.Linear(heads * WIDTH, 12)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        q, k, v = (
            project(x).unflatten(-1, (-1, WIDTH)).transpose(1, 2)
            for project in (self.q, self.k, self.v)
        )
        if self.copied:
            k, v = (t.repeat_interleave(self.repeats, 1) for t in (k, v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return {"loss": self.out(y.transpose(1, 2).flatten(2)).square().sum()}


@pytest.mark.parametrize("copied", [True, False])
@pytest.mark.parametrize(("heads", "groups", "tp"), [(4, 2, 4), (6, 2, 4), (6, 3, 6), (8, 4, 5)])
def test_each_rank_takes_the_heads_that_it_reads(
    heads: int, groups: int, tp: int, copied: bool
) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    case = run_eager(Grouped(heads, groups, copied).double(), {"x": x})
    graph = separate_heads(training_graph(case.recording.graph), tp)
    sharding = shard(graph, tp)
    splits = {name: str(lay) for name, lay in sharding.splits(graph).items()}
    assert splits["q.weight"] == f"{heads}*·{WIDTH} x 12"
    assert splits["out.weight"] == f"12 x {heads}*·{WIDTH}"
    assert splits.keys() == {"q.weight", "q.bias", "out.weight"}
    ops = Counter(n.op for n in spmd_partition(graph, sharding, 0).nodes)
    assert ops["merakc.all_reduce.default"] == 1
    compare(case, *run_sharded(case, (graph,), sharding))


@pytest.mark.parametrize(("heads", "groups", "tp"), [(8, 4, 4), (8, 2, 4), (8, 1, 4), (2, 2, 4)])
def test_heads_that_can_be_split_together_stay_together(heads: int, groups: int, tp: int) -> None:
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    case = run_eager(Grouped(heads, groups, copied=False).double(), {"x": x})
    graph = training_graph(case.recording.graph)
    assert separate_heads(graph, tp) is graph or separate_heads(graph, tp) == graph
    compare(case, *run_sharded(case, (graph,), shard(graph, tp)))


def test_a_model_with_more_ranks_than_key_heads() -> None:
    case = eager("llama")
    graph = separate_heads(training_graph(case.recording.graph), 4)
    sharding = shard(graph, 4)
    assert not [name for name in sharding.splits(graph) if "k_proj" in name]
    compare(case, *run_sharded(case, (graph,), sharding))


class Masked(Grouped):
    """The same, with a mask of the batch's for each head."""

    def forward(self, x: Tensor, mask: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        q, k, v = (
            project(x).unflatten(-1, (-1, WIDTH)).transpose(1, 2)
            for project in (self.q, self.k, self.v)
        )
        y = nn.functional.scaled_dot_product_attention(q, k, v, mask)
        return {"loss": self.out(y.transpose(1, 2).flatten(2)).square().sum()}


@pytest.mark.parametrize(("heads", "tp"), [(4, 2), (6, 4)])
def test_a_rank_takes_its_heads_of_a_mask(heads: int, tp: int) -> None:
    """As where what a batch says of padding is computed before the step, with a bias for each."""
    torch.manual_seed(0)
    batch = {"x": torch.randn(2, 5, 12).double(), "mask": torch.randn(2, heads, 5, 5).double()}
    case = run_eager(Masked(heads, heads, copied=False).double(), batch)
    graph = separate_heads(training_graph(case.recording.graph), tp)
    sharding = shard(graph, tp)
    assert {"q.weight", "k.weight", "v.weight"} <= sharding.splits(graph).keys()
    assert not [n for n in graph.nodes if n.op == "aten.index.Tensor"]
    compare(case, *run_sharded(case, (graph,), sharding))
