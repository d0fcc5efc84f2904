"""Products gathered where nothing else can be split: every kind of product, against eager."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from merakc.errors import ShardError
from merakc.ir.layout import parse_layout
from merakc.lowering.lowered import training_graph
from merakc.passes.sharding.gather_products import gather_all, gather_products, gathers
from merakc.passes.sharding.shard import shard
from merakc.passes.sharding.spmd import spmd_partition
from tests.frontend.small import randn
from tests.passes.whole_models import compare, eager, run_eager, run_sharded


class Normed(nn.Module):
    """A norm behind each product: linear, with a bias and without, convolution, matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 6), nn.Linear(6, 5, bias=False)
        self.space = nn.Conv1d(5, 7, 3, padding=1)
        self.third = nn.Parameter(torch.randn(7, 4))
        self.fourth = nn.Parameter(torch.randn(2, 4, 3))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = F.layer_norm(self.first(x), (6,))
        y = F.layer_norm(self.second(y), (5,))
        y = F.layer_norm(self.space(y.mT).mT, (7,))
        y = F.layer_norm(y @ self.third, (4,))
        y = F.layer_norm(torch.bmm(y, self.fourth), (3,))
        return {"loss": y.pow(3).sum()}


COLUMNS = {
    "first.weight": "6* x 8", "second.weight": "5* x 6", "space.weight": "7* x 5 x 3",
    "third": "7 x 4*", "fourth": "2 x 4 x 3*",
}  # fmt: skip


@pytest.mark.parametrize("tp", [2, 3])
def test_every_kind_of_product_is_split_and_gathered(tp: int) -> None:
    torch.manual_seed(0)
    case = run_eager(Normed().double(), {"x": randn(2, 9, 8)})
    graph = training_graph(case.recording.graph)
    with pytest.raises(ShardError):
        shard(graph, tp)
    gathered = gather_products(graph, tp)
    for name, text in COLUMNS.items():
        sharding = shard(gathered, tp, {name: parse_layout(text)})
        ops = [n.op for n in spmd_partition(gathered, sharding, 0).nodes]
        assert ops.count("merakc.all_gather.default") == 1
        assert "composite.gathered" not in ops
        compare(case, *run_sharded(case, (gathered,), sharding))


def test_what_is_worth_its_gather_is_split() -> None:
    graph = training_graph(run_eager(Normed(), {"x": torch.randn(2, 9, 8)}).recording.graph)
    gathered = gather_products(graph, 2)
    # The first product's argument has no gradient to be summed over the ranks.
    assert shard(gathered, 2).splits(gathered).keys() == {"first.weight", "first.bias"}


def test_a_plans_splits_are_found_again() -> None:
    graph = gather_all(training_graph(run_eager(Normed(), {"x": torch.randn(2, 9, 8)})
                                      .recording.graph))  # fmt: skip
    first = shard(graph, 2)
    assert shard(graph, 2, first.splits(graph)) == first


def test_a_graph_that_can_be_split_stays() -> None:
    graph = training_graph(eager("gpt2").recording.graph)
    assert gather_products(graph, 2) is graph
    assert gather_products(graph, 1) is graph
    assert not gathers(graph)
    assert gathers(gather_all(graph))


def test_where_gathering_does_not_help_the_graph_stays_and_is_refused() -> None:
    torch.manual_seed(0)
    graph = training_graph(run_eager(Normed(), {"x": torch.randn(2, 9, 8)}).recording.graph)
    assert gather_products(graph, 9) is graph  # no dim of nine
    with pytest.raises(ShardError):
        shard(graph, 9)
