"""Sequences cut over ranks that hold a model whole: what computes on parts, and what does not."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from functools import cache
from itertools import chain

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.zoo_models import ZOO
from merakc.errors import ShardError
from merakc.frontend.calls.forms import new_fake_mode
from merakc.frontend.record import record
from merakc.ir.graph import Graph, Output, OutputKind, Ref
from merakc.lowering.lowered import TRAINING, headed
from merakc.passes.autodiff.interpret import interpret
from merakc.passes.sharding.layouts import Sharding
from merakc.passes.sharding.sequences import heads, rings
from merakc.passes.sharding.shard import shard
from merakc.passes.sharding.spmd import spmd_partition
from tests.recorded import one_of_several

B, S, H, WORDS = 2, 12, 16, 32


class Attends(nn.Module):
    """A token's embedding, one attention, and a loss that adds up over tokens."""

    def __init__(self, *, flips: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, H)
        self.packed = nn.Linear(H, 3 * H)
        self.out = nn.Linear(H, WORDS)
        self.flips = flips

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        q, k, v = self.packed(self.words(ids)).view(B, S, 3, 4, H // 4).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        mixed = mixed.transpose(1, 2).reshape(B, S, H)
        if self.flips:
            mixed = mixed + mixed.flip(1)
        return F.cross_entropy(self.out(mixed).flatten(0, 1), labels.flatten(), reduction="sum")


@cache
def _graph(*, flips: bool = False) -> Graph:
    ids = torch.zeros(B, S, dtype=torch.long)
    return record(Attends(flips=flips), (ids, ids), {}).graph


def _split(graph: Graph, ranks: int = 2) -> Sharding:
    return shard(graph, 1, cp=ranks)


def _cp(graph: Graph) -> Sharding:
    context = _split(graph).context
    assert context is not None
    return context


def _locals(graph: Graph, ranks: int) -> list[Graph]:
    sharding = _split(graph, ranks)
    found = [spmd_partition(graph, sharding, rank) for rank in range(ranks)]
    for local in found:
        local.verify()
    return found


def _ops(local: Graph) -> list[str]:
    return [n.op.removeprefix("merakc.").removesuffix(".default") for n in local.nodes]


def test_all_that_is_trained_computes_on_parts() -> None:
    graph = _graph()
    inside = set(chain.from_iterable(s.nodes for s in _cp(graph).sequences))
    trained = {n.name for n in graph.nodes if Ref(n.name) in graph.grad_values()}
    assert trained == inside


@pytest.mark.parametrize("ranks", [2, 5])  # 5: parts of two sizes
def test_keys_and_values_are_gathered_and_queries_know_their_rows(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heads, "EXCHANGE_PRICE", 1e9)
    monkeypatch.setattr(rings, "RING_PRICE", 1e9)
    starts = []
    for local in _locals(_graph(), ranks):
        ops = _ops(local)
        assert ops.count("gather_to") == 2
        assert ops.count("all_reduce") == 1  # of the loss
        assert "all_gather" not in ops
        (attention,) = [n for n in local.nodes if "attention" in n.op]
        starts.append(attention.args[6])
        assert attention.spec.shape[2] in (S // ranks, S // ranks + 1)
    assert starts == [int(part[0]) for part in torch.arange(S).tensor_split(ranks)]


def test_no_parameter_is_split() -> None:
    graph = _graph()
    assert _split(graph).splits(graph) == {}
    for item, whole in zip(_locals(graph, 2)[1].inputs, graph.inputs, strict=False):
        if item.target and item.kind.name == "PARAMETER":
            assert item.spec == whole.spec


def test_what_needs_a_sequence_whole_is_computed_whole() -> None:
    """A sequence that is turned round is gathered, and its parts are taken behind that."""
    graph = _graph(flips=True)
    inside = set(chain.from_iterable(s.nodes for s in _cp(graph).sequences))
    (flip,) = [n for n in graph.nodes if n.op == "aten.flip.default"]
    assert flip.name not in inside
    (local, _) = _locals(graph, 2)
    (flipped,) = [n for n in local.nodes if n.op == "aten.flip.default"]
    assert flipped.spec.shape == (B, S, H)


def test_without_a_sequence_it_is_refused() -> None:
    x = torch.zeros(4, H)
    graph = record(nn.Sequential(nn.Linear(H, H), nn.Linear(H, 1)), (x,), {}).graph
    with pytest.raises(ShardError, match=r"cp=2: no dim of 2 or more elements .* use cp=1"):
        _split(graph)


class Windows(nn.Module):
    """Attention within windows: each of two dims of the activations could be the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.up, self.out = nn.Embedding(WORDS, H), nn.Linear(H, H), nn.Linear(H, WORDS)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.up(self.words(ids))
        y = x.reshape(B, -1, 4, H)
        x = x + F.scaled_dot_product_attention(y, y, y).reshape(x.shape)
        return F.cross_entropy(self.out(x).flatten(0, 1), labels.flatten())


def told_of_windows() -> str:
    ids = torch.zeros(B, 8, dtype=torch.long)
    return _split(record(Windows(), (ids, ids), {}).graph).told()


def test_of_dims_that_are_as_good_every_process_takes_the_same() -> None:
    code = f"from {__name__} import told_of_windows; print(told_of_windows())"
    for seed in ("1", "2"):  # by which Python orders texts in sets
        own = {**os.environ, "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1"}
        run = [sys.executable, "-c", code]
        found = subprocess.run(run, env=own, capture_output=True, text=True, check=True)
        assert found.stdout.strip() == told_of_windows()


class Distances(nn.Module):
    """Of each token from each: one value has both dims of the result."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.up = nn.Embedding(WORDS, H), nn.Linear(H, H)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.up(self.words(ids))
        return (torch.cdist(x, x) @ x).square().sum()


def test_what_has_all_of_a_value_and_its_part_is_computed_whole() -> None:
    graph = record(Distances(), (torch.zeros(B, S, dtype=torch.long),), {}).graph
    nodes = {name for split in _cp(graph).sequences for name in split.nodes}
    (distances,) = (n.name for n in graph.nodes if "cdist" in n.op)
    assert distances not in nodes
    assert {n.name for n in graph.nodes if "linear" in n.op} <= nodes


# Of Longformer one length divides as 3 x 4, and behind its windows as 6 x 2.
@pytest.mark.parametrize("name", ["longformer", "gemma3"])
def test_parts_are_of_the_sizes_that_calls_give(name: str) -> None:
    case = ZOO[name]
    recording = one_of_several(case.model(), case.batch(4))
    for local in _locals(headed(recording, 2, TRAINING, 1).graph, 2):
        single = [n for n in local.nodes if len(n.outputs) == 1]
        outputs = tuple(Output(n.name, OutputKind.RESULT, Ref(n.name)) for n in single)
        with new_fake_mode():
            values = {i.name: torch.empty(i.spec.shape, dtype=i.spec.dtype) for i in local.inputs}
            made = interpret(replace(local, outputs=outputs), values)
        for node, value in zip(single, made, strict=True):
            assert value.shape == node.spec.shape, node
