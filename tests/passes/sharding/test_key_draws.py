"""Which dim of a random draw counts the samples, and that samples draw alike in any micro-batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.models import MODELS
from merakc.frontend.record import record
from merakc.ir.graph import Graph, Ref
from merakc.kernels.draws import KEY_POSITION
from merakc.lowering.lowered import training_graph
from merakc.passes.autodiff.interpret import interpret
from merakc.passes.batches.recorded import in_parts as step_in_parts
from merakc.passes.sharding.key_draws import has_draws, key_draws
from merakc.passes.sharding.shard import shard
from merakc.passes.sharding.spmd import spmd_partition
from tests.frontend.small import Small, linear, randn
from tests.recorded import recorded as in_parts

LENGTH, WIDTH = 5, 6
COPY_TO = "merakc.copy_to.default"
SAMPLED = frozenset({"x"})


def drop_path(x: Tensor) -> Tensor:
    return x * torch.rand((x.shape[0],) + (1,) * (x.ndim - 1), dtype=x.dtype)


def heads(x: Tensor) -> Tensor:
    """[b, s, 6] as [b * 2, s, 3]."""
    return x.unflatten(-1, (2, 3)).transpose(1, 2).flatten(0, 1)


def attend(x: Tensor) -> Tensor:
    y = x.unflatten(-1, (2, 3)).transpose(1, 2)
    y = F.scaled_dot_product_attention(y, y, y, dropout_p=0.5)
    return y.transpose(1, 2).flatten(2)


def sort(x: Tensor) -> Tensor:
    """Through an op that has no sharding rule."""
    return torch.ops.aten.sort.stable(x, stable=True, dim=-1)[0]


TABLE = randn(1, LENGTH, WIDTH)
# What is drawn from [b, 5, 6], and how it is keyed for b = 4: the samples' dim, and sizes.
DRAWS: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, tuple[int, ...]]]] = {
    "dropout": (lambda x: F.dropout(x, 0.5), (0, (4, 30))),
    "features": (lambda x: F.dropout1d(x, 0.5), (0, (4, 5))),
    "attention": (attend, (0, (4, 50))),
    "batch and heads": (lambda x: F.dropout(heads(x), 0.5), (0, (4, 30))),
    "tokens": (lambda x: F.dropout(x.flatten(0, 1), 0.5), (0, (4, 30))),
    "sequence first": (lambda x: F.dropout(x.transpose(0, 1), 0.5), (1, (5, 4, 6))),
    "heads of sequence first": (
        lambda x: F.dropout(x.transpose(0, 1).reshape(LENGTH, -1, 3), 0.5), (1, (5, 4, 6))),
    "samples last": (lambda x: F.dropout(x.movedim(0, -1), 0.5), (1, (30, 4, 1))),
    "drop path": (drop_path, (0, (4, 1))),
    "noise": (lambda x: x + torch.randn_like(x), (0, (4, 30))),
    "noise of tokens": (
        lambda x: x + torch.randn(x.shape[0] * LENGTH, WIDTH).view_as(x), (0, (4, 30))),
    "noise levels": (
        lambda x: x * torch.randint(3, (x.shape[0],))[:, None, None], (0, (4, 1))),
    "samples in two dims": (
        lambda x: F.dropout(x.view(-1, min(2, len(x)), LENGTH, WIDTH), 0.5), (0, (4, 30))),
    "without a rule": (lambda x: F.dropout(sort(x), 0.5), (0, (4, 30))),
    "heads without a rule": (lambda x: F.dropout(heads(sort(x)), 0.5), (0, (4, 30))),
    "sequence first without a rule": (
        lambda x: F.dropout(sort(x.transpose(0, 1)).reshape(LENGTH, -1, 3), 0.5), (1, (5, 4, 6))),
    "positions": (lambda x: x + F.dropout(TABLE, 0.5), (-1, (30,))),
    "positions of every sample": (
        lambda x: x + F.dropout(TABLE.expand(x.shape[0], -1, -1) * 2, 0.5), (0, (4, 30))),
    "one number": (lambda x: x * torch.rand(()), (-1, (1,))),
    "noise for all": (lambda x: x + torch.randn(LENGTH, WIDTH), (-1, (30,))),
    "sum over samples": (lambda x: x + F.dropout(x.sum(0), 0.5), (0, (1, 30))),
}  # fmt: skip
# What no sample is alone in: a sum over them; a view of another form for another number.
COUPLED = ("sum over samples", "samples in two dims")


def model(name: str) -> nn.Module:
    call = DRAWS[name][0]
    torch.manual_seed(0)
    return Small(lambda s, x: call(s.layer(x)), layer=linear())


def recorded(module: nn.Module, samples: int) -> Graph:
    batch = {"x": torch.zeros(samples, LENGTH, WIDTH, dtype=torch.float64)}
    return record(module, (), batch).graph


def keyings(graph: Graph) -> list[tuple[int, tuple[int, ...]]]:
    found = []
    for node in graph.nodes:
        if node.op in KEY_POSITION:
            sample, sizes, starts, local = node.args[KEY_POSITION[node.op] + 1 :][:4]
            assert sizes == local
            assert starts == (0,) * len(sizes)
            found.append((sample, sizes))
    return found


@pytest.mark.parametrize("name", DRAWS)
def test_the_dim_of_the_samples_is_found(name: str) -> None:
    graph = recorded(model(name), 4)
    assert keyings(key_draws(graph, SAMPLED)) == [DRAWS[name][1]]


def run(graph: Graph, module: nn.Module, x: Tensor, first: int) -> Tensor:
    values: dict[str, Any] = {"seed": torch.tensor(7), "first_sample": torch.tensor(first), "x": x}
    state = dict(module.named_parameters())
    values |= {i.name: state[i.target] for i in graph.inputs if i.target in state}
    (out,) = interpret(graph, {i.name: values[i.name] for i in graph.inputs if i.name in values})
    assert isinstance(out, Tensor)
    return out.detach()


def by_sample(out: Tensor, name: str, samples: int) -> Tensor:
    """An output as [samples, elements]."""
    sample, sizes = DRAWS[name][1]
    before = sizes[0] if sample == 1 else 1
    return out.reshape(before, samples, -1).transpose(0, 1).flatten(1)


@pytest.mark.parametrize("name", [n for n in DRAWS if n not in COUPLED])
def test_samples_draw_alike_in_micro_batches_of_any_size(name: str) -> None:
    """By the algebra of batches, which settles what the factors guess."""
    module, x = model(name), randn(4, LENGTH, WIDTH)
    graph = in_parts(module, {"x": x}).graph
    assert keyings(graph) == [DRAWS[name][1]]
    whole, other = run(graph, module, x, 4), run(graph, module, x, 5)
    assert torch.equal(other, whole) == (DRAWS[name][1][0] == -1)
    for each in (1, 2):
        graph = in_parts(module, {"x": x}, 4 // each).graph
        for first in range(0, 4, each):
            part = run(graph, module, x[first : first + each], 4 + first)
            wanted = by_sample(whole, name, 4)[first : first + each]
            torch.testing.assert_close(by_sample(part, name, each), wanted, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", COUPLED)
def test_what_meets_all_samples_draws_once_for_all(name: str) -> None:
    """In the head: the numbers of a whole batch, however many its parts."""
    module, x = model(name), randn(4, LENGTH, WIDTH)
    assert [sample for sample, _ in keyings(in_parts(module, {"x": x}).graph)] == [-1]
    recording = in_parts(module, {"x": x}, 2)
    step = step_in_parts(recording, 2)
    assert not has_draws(step.graph)
    assert step.head is not None
    assert has_draws(step.head.graph)


def test_tensors_that_are_not_split_hold_no_samples() -> None:
    graph = recorded(model("dropout"), 4)
    assert keyings(key_draws(graph, frozenset())) == [(-1, (120,))]


def test_graphs_without_draws_stay_as_they_are() -> None:
    graph = recorded(Small(lambda s, x: s.layer(x), layer=linear()), 4)
    assert not has_draws(graph)
    assert key_draws(graph, SAMPLED) is graph
    assert has_draws(recorded(model("noise"), 4))


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_attention_with_dropout_is_split_by_heads(name: str) -> None:
    """As without: each rank draws for its own heads, and nothing more is summed."""
    case = MODELS[name]
    batch = case.batch(4, torch.float64)
    collectives = []
    for dropout in (0.0, 0.1):
        module = case.model(torch.float64, dropout=dropout)
        graph = key_draws(training_graph(record(module, (), batch).graph), frozenset(batch))
        sharding = shard(graph, 2)
        ops = [n.op for n in spmd_partition(graph, sharding, 0).nodes]
        collectives.append([ops.count("merakc.all_reduce.default"), ops.count(COPY_TO)])
        weights = [n for n in graph.nodes if n.op in KEY_POSITION and len(n.spec.shape) == 4]
        assert len(weights) == (4 if dropout else 0)
        for node in weights:
            layout = sharding.layouts[Ref(node.name)]
            assert [f.split for f in layout.dims[1]] == [True], layout
            assert layout.local_shape(2, 1)[1] == 2
    assert collectives[0] == collectives[1]
