from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor, nn

from benchmarks.models import MODELS
from benchmarks.zoo_models import ZOO
from merakc.frontend.record import record
from merakc.ir.graph import Graph, Ref
from merakc.ir.strategy import Strategy
from merakc.lowering.lowered import make_plan, training_graph
from merakc.machines.cluster import NOMINAL_GPU
from merakc.passes.sharding.shard import shard
from merakc.passes.sharding.spmd import spmd_partition
from merakc.passes.stages.stage import assign_stages, split_stages
from tests.passes.whole_models import compare, eager, run_eager, run_sharded

DECODERS = ("llama", "gpt2", "qwen2", "gpt_neox", "opt")


def collectives(graph: Graph, tp: int, *, sequence_parallel: bool = True) -> Counter[str]:
    sharding = shard(graph, tp, sequence_parallel=sequence_parallel)
    ops = (n.op for n in spmd_partition(graph, sharding, 0).nodes if n.op.startswith("merakc."))
    return Counter(op.split(".")[1] for op in ops)


@pytest.mark.parametrize("name", DECODERS)
def test_decoders_get_the_form_of_the_paper(name: str) -> None:
    """Two reduce-scatters and two all-gathers a layer forward, and an all-gather at the head."""
    graph = training_graph(eager(name).recording.graph)
    plain = collectives(graph, 2, sequence_parallel=False)
    found = collectives(graph, 2)
    assert found["reduce_scatter"] == plain["all_reduce"]
    assert found["gather_to"] == plain["copy_to"]
    assert found["all_reduce"] == found["all_gather"] == 0
    assert found["scatter"] <= 2  # the embeddings, of tokens and of positions


@pytest.mark.parametrize("name", ["rwkv", "swin", "unet", "wavenet", "clip", "deberta_v2", "lstm"])
def test_other_architectures_equal_one_process(name: str) -> None:
    case = run_eager(ZOO[name].model(torch.float64), ZOO[name].batch(2, torch.float64))
    graph = training_graph(case.recording.graph)
    sharding = shard(graph, 3, sequence_parallel=True)
    assert sharding.sequences
    compare(case, *run_sharded(case, (graph,), sharding))


def test_a_sequence_that_is_cut_elsewhere_is_still_one() -> None:
    """Without a mask given, a Llama looks for packed sequences in slices of its positions."""
    case = MODELS["llama"]
    batch = case.batch(1)
    batch.pop("attention_mask")
    recording = record(case.model(), (), batch)
    graph = training_graph(recording.graph)
    assert any(n.op == "aten.slice.Tensor" and n.args[1:] == (-1, 1, 13) for n in graph.nodes)
    found = collectives(graph, 2)
    assert found["all_gather"] == 0
    assert found["scatter"] == 1


def test_an_encoder_and_a_decoder_have_a_sequence_each() -> None:
    graph = training_graph(eager("t5").recording.graph)
    sharding = shard(graph, 2, sequence_parallel=True)
    plain = collectives(graph, 2, sequence_parallel=False)
    assert collectives(graph, 2)["reduce_scatter"] == plain["all_reduce"]
    assert sharding.sequences
    for one in sharding.sequences:
        for other in sharding.sequences:
            assert one is other or not one.nodes & other.nodes


@pytest.mark.parametrize("name", ["llama", "bart", "mixtral"])
@pytest.mark.parametrize("tp", [2, 3])
def test_parts_cross_stage_boundaries(name: str, tp: int) -> None:
    case = eager(name)
    graph = training_graph(case.recording.graph)
    sharding = shard(graph, tp, sequence_parallel=True)
    of, _ = assign_stages(graph, sharding, 3, NOMINAL_GPU)
    stages = split_stages(graph, of, 3, sharding)
    plain = split_stages(graph, of, 3, shard(graph, tp))
    sent = sum(t.size_bytes for t in stages.transfers)
    assert sent < sum(t.size_bytes for t in plain.transfers)
    compare(case, *run_sharded(case, stages.graphs, stages.sharding))


def test_a_merged_dim_is_split_in_its_inner_part() -> None:
    class Flat(nn.Module):
        """Works on samples x positions as one dim; the loss reads it whole."""

        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(8)
            self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            flat = x.reshape(-1, 8)
            out = flat + self.down(self.up(self.norm(flat)).relu())
            out = out + self.down(self.up(self.norm(out)).relu())
            return {"loss": out.reshape(x.shape).cumsum(0).square().sum()}

    torch.manual_seed(0)
    case = run_eager(Flat().double(), {"x": torch.randn(3, 5, 8, dtype=torch.float64)})
    graph = training_graph(case.recording.graph)
    sharding = shard(graph, 2, sequence_parallel=True)
    assert sharding.sequences
    compare(case, *run_sharded(case, (graph,), sharding))


def test_the_bias_of_a_convolution_is_taken_in_parts() -> None:
    class Channels(nn.Module):
        """A residual convolution; its own channels are what is carried."""

        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Conv1d(6, 32, 3, padding=1), nn.Conv1d(32, 6, 3, padding=1)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            for _ in range(2):
                x = (x + self.down(self.up(x).relu())).tanh()
            return {"loss": x.square().sum()}

    torch.manual_seed(0)
    case = run_eager(Channels().double(), {"x": torch.randn(1, 6, 1, dtype=torch.float64)})
    graph = training_graph(case.recording.graph)
    sharding = shard(graph, 2, sequence_parallel=True)
    assert any(Ref("down.bias") in split.layouts for split in sharding.sequences)
    compare(case, *run_sharded(case, (graph,), sharding))


def test_nothing_is_split_where_nothing_can_be_carried() -> None:
    graph = training_graph(eager("llama").recording.graph)
    assert not shard(graph, 1, sequence_parallel=True).sequences

    class Short(nn.Module):
        """No dim is as long as there are ranks but the hidden layer's."""

        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(2, 32), nn.Linear(32, 2)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"loss": self.down(self.up(x).relu()).square().sum()}

    graph = training_graph(run_eager(Short(), {"x": torch.randn(2, 2)}).recording.graph)
    assert shard(graph, 4, sequence_parallel=True) == shard(graph, 4)


def test_activations_shrink_with_tp() -> None:
    recording = eager("llama").recording
    held = [
        sum(
            o.size_bytes
            for n in make_plan(recording, Strategy(tp=4, sequence_parallel=form), NOMINAL_GPU)
            .stages.local[0].nodes
            for o in n.outputs if o is not None and n.op.startswith("aten.mul")
        )
        for form in (False, True)
    ]  # fmt: skip
    assert held[1] < 0.6 * held[0]
