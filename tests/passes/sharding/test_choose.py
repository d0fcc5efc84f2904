"""What is split: Megatron's plan where it pays, and words where nothing can be."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from merakc.errors import PlanError, ShardError
from merakc.frontend.record import record
from merakc.ir.graph import Graph
from merakc.ir.layout import parse_layout
from merakc.lowering.lowered import training_graph
from merakc.machines.cluster import NOMINAL_GPU
from merakc.passes.sharding.choose import candidates, repeated_factors, split_of
from merakc.passes.sharding.factors import Factor
from merakc.passes.sharding.propagate import propagate
from merakc.passes.sharding.separate_heads import separate_heads
from merakc.passes.sharding.shard import shard
from merakc.passes.sharding.spmd import spmd_partition
from tests.frontend.small import Small, linear, randn
from tests.passes.whole_models import Eager, compare, eager, run_eager, run_sharded

LAYERS = 2
SIZES: dict[str, Any] = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": LAYERS,
    "num_attention_heads": 16, "vocab_size": 50257,
}  # fmt: skip
REALISTIC: dict[str, Callable[[], nn.Module]] = {
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=1024, n_layer=LAYERS, n_head=16, use_cache=False)),
    "llama": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SIZES, num_key_value_heads=4, use_cache=False)),
    "qwen2": lambda: transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(**SIZES, num_key_value_heads=4, use_cache=False)),
    "bert": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**SIZES)),
    "opt": lambda: transformers.OPTForCausalLM(
        transformers.OPTConfig(hidden_size=1024, ffn_dim=4096, num_hidden_layers=LAYERS,
                               num_attention_heads=16, vocab_size=50257, use_cache=False,
                               word_embed_proj_dim=1024)),
    "gpt_neox": lambda: transformers.GPTNeoXForCausalLM(
        transformers.GPTNeoXConfig(**SIZES, use_cache=False)),
}  # fmt: skip


@cache
def realistic(name: str) -> Graph:
    """A model of hidden size 1024 on the meta device, recorded with two sequences of 512."""
    with torch.device("meta"):
        model = REALISTIC[name]().train()
    ids = torch.zeros(2, 512, dtype=torch.long)
    return training_graph(record(model, (), {"input_ids": ids, "labels": ids}).graph)


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("name", REALISTIC)
def test_megatrons_plan_is_found(name: str, tp: int) -> None:
    graph = realistic(name)
    sharding = shard(graph, tp)
    ops = [n.op for n in spmd_partition(graph, sharding, 0).nodes]
    # the last copy enters the vocabulary-parallel head
    assert ops.count("merakc.all_reduce.default") == 2 * LAYERS
    assert ops.count("merakc.copy_to.default") == 2 * LAYERS + 1
    assert ops.count("merakc.all_gather.default") == 0
    assert ops.count("composite.vocab_parallel_embedding") == 1
    assert ops.count("composite.vocab_parallel_cross_entropy") == 1
    split = sharding.splits(graph)
    tables = [str(lay) for name, lay in split.items() if lay.shape == (50257, 1024)]
    assert set(tables) == {"50257* x 1024"}
    assert not [n for n in split if "wpe" in n or "position" in n]
    assert len([n for n in split if n.endswith("weight")]) >= 4 * LAYERS + 1
    assert not [text for text in sharding.whole_ops(graph) if "aten.index" not in text]


def test_gpt2s_layers_are_split_by_columns_and_by_rows() -> None:
    split = {k: str(v) for k, v in shard(realistic("gpt2"), 2).splits(realistic("gpt2")).items()}
    assert {k.removeprefix("transformer.h.0."): v for k, v in split.items() if ".h.0." in k} == {
        "attn.c_attn.weight": "1024 x 3·16*·64",
        "attn.c_attn.bias": "3·16*·64",
        "attn.c_proj.weight": "16*·64 x 1024",
        "mlp.c_fc.weight": "1024 x 4096*",
        "mlp.c_fc.bias": "4096*",
        "mlp.c_proj.weight": "4096* x 1024",
    }


def test_llamas_key_value_heads_lead() -> None:
    split = {k: str(v) for k, v in shard(realistic("llama"), 4).splits(realistic("llama")).items()}
    assert split["model.layers.1.self_attn.q_proj.weight"] == "4*·256 x 1024"
    assert split["model.layers.1.self_attn.k_proj.weight"] == "4*·64 x 1024"
    assert split["model.layers.1.self_attn.o_proj.weight"] == "1024 x 4*·256"


def test_with_more_ranks_than_key_heads_these_stay_whole() -> None:
    graph = separate_heads(realistic("llama"), 8)
    split = shard(graph, 8).splits(graph)
    assert not [name for name in split if "k_proj" in name or "v_proj" in name]
    assert str(split["model.layers.0.self_attn.q_proj.weight"]) == "16*·64 x 1024"
    assert str(split["model.layers.0.mlp.up_proj.weight"]) == "4096* x 1024"


def test_a_plans_splits_are_found_again() -> None:
    graph = realistic("gpt2")
    first = shard(graph, 4)
    assert shard(graph, 4, first.splits(graph)) == first


def test_a_split_that_the_graph_does_not_have_is_refused() -> None:
    graph = training_graph(eager("gpt2").recording.graph)
    name = "transformer.h.0.mlp.c_fc.weight"
    with pytest.raises(PlanError, match="a factor of 8"):
        shard(graph, 2, {name: parse_layout("32 x 8*·16")})
    with pytest.raises(PlanError, match="of shape"):
        shard(graph, 2, {name: parse_layout("32 x 32*")})
    with pytest.raises(PlanError, match="needs whole"):
        shard(graph, 2, {"transformer.ln_f.weight": parse_layout("32*")})


class DenseExperts(nn.Module):
    """Experts as a dim of their weights; tokens that are not dispatched to one are zeros."""

    def __init__(self, width: int, hidden: int, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts)
        self.up = nn.Parameter(torch.randn(experts, width, hidden))
        self.down = nn.Parameter(torch.randn(experts, hidden, width))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        gates = self.gate(x).softmax(-1)
        tokens = torch.einsum("bse,bsd->ebsd", (gates > 0.2).to(x.dtype), x)
        inner = torch.einsum("ebsd,edh->ebsh", tokens, self.up).relu()
        out = torch.einsum("bse,ebsh,ehd->bsd", gates, inner, self.down)
        return {"loss": (out - y).square().mean()}


def dense_experts(width: int, hidden: int, experts: int) -> Eager:
    model = DenseExperts(width, hidden, experts).double()
    return run_eager(model, {"x": randn(2, 8, width), "y": randn(2, 8, width)})


def test_experts_that_are_a_dim_of_products_are_split() -> None:
    case = dense_experts(8, 3, 6)  # hidden units too few to be split in four
    graph = training_graph(case.recording.graph)
    sharding = shard(graph, 4)
    split = {name: str(lay) for name, lay in sharding.splits(graph).items()}
    assert split["up"] == "6* x 8 x 3"
    assert split["down"] == "6* x 3 x 8"
    compare(case, *run_sharded(case, (graph,), sharding))


@pytest.mark.parametrize("name", ["up", "down"])
def test_experts_or_their_hidden_units_may_be_split(name: str) -> None:
    case = dense_experts(4, 6, 3)
    graph = training_graph(case.recording.graph)
    for text in {"up": ("3* x 4 x 6", "3 x 4 x 6*"), "down": ("3* x 6 x 4", "3 x 6* x 4")}[name]:
        sharding = shard(graph, 2, {name: parse_layout(text)})
        assert len(sharding.splits(graph)) > 1
        compare(case, *run_sharded(case, (graph,), sharding))


def test_the_hidden_units_of_experts_are_split_where_rows_stand_in_their_order() -> None:
    graph = training_graph(eager("mixtral").recording.graph)
    split = {name: str(lay) for name, lay in shard(graph, 2).splits(graph).items()}
    assert split["model.layers.0.mlp.experts.gate_up_proj"] == "4 x 2·64* x 32"
    assert split["model.layers.0.mlp.experts.down_proj"] == "4 x 32 x 64*"


class Sorted(nn.Module):
    """An op without a rule in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": torch.renorm(self.first(x), 2, 0, 1.0).sum()}


class Narrow(nn.Module):
    """Nothing wider than 6."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.last(torch.relu(self.first(x))).square().sum()}


def graph_of(model: nn.Module, width: int) -> Graph:
    return training_graph(record(model, (), {"x": torch.randn(4, width)}).graph)


def test_where_nothing_can_be_split_the_op_and_its_line_are_named() -> None:
    with pytest.raises(
        ShardError, match=r"aten.renorm.default at .*test_choose.py:\d+;.* use tp=1"
    ):
        shard(graph_of(Sorted(), 8), 2)
    found = shard(graph_of(Sorted(), 8), 1).whole_ops(graph_of(Sorted(), 8))
    assert len(found) == 1
    assert found[0].startswith("aten.renorm.default at ")


def test_too_large_a_degree_names_the_one_that_works() -> None:
    with pytest.raises(ShardError, match="use tp=6 or less"):
        shard(graph_of(Narrow(), 6), 7)
    assert shard(graph_of(Narrow(), 6), 6).splits(graph_of(Narrow(), 6))


def test_small_models_are_split_where_that_was_asked_for() -> None:
    split = shard(graph_of(Narrow(), 6), 2).splits(graph_of(Narrow(), 6))
    assert str(split["first.weight"]) == "6* x 6"
    assert str(split["last.weight"]) == "6 x 6*"


def test_a_recurrence_is_not_split_along_its_own_diagonal() -> None:
    """`x + Linear(h, h)(x)` makes one factor of both dims of the weight."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        y = m.a(x)
        for _ in range(2):
            y = y + m.b(y).tanh()
        return (y * y).sum()

    model = Small(forward, a=linear(6, 6), b=linear(6, 6))
    recording = record(model, (randn(4, 6),), {})
    dims = propagate(training_graph(recording.graph))
    assert repeated_factors(dims)
    assert not repeated_factors(dims) & candidates(dims, 2, NOMINAL_GPU).keys()


def test_of_as_many_equal_parts_as_ranks_a_rank_has_what_it_has_of_the_whole() -> None:
    """Eight heads that are split over two ranks, and a graph in which they are two times four."""
    parts, (whole, _) = [Factor(2), Factor(4), Factor(3)], parse_layout("8*·3 x 1").dims
    assert split_of(parts, whole, "w", 2) == {parts[0]}
    for ranks in (0, 4):
        with pytest.raises(PlanError, match="splits 'w' at a factor of 8"):
            split_of(parts, whole, "w", ranks)
    odd = parse_layout("7*·3").dims[0]
    with pytest.raises(PlanError, match="splits 'w' at a factor of 7"):
        split_of(parts, odd, "w", 2)
