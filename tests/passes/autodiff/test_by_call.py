"""Equal calls, differentiated once, against torch's own trace of the whole graph."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import merakc
from merakc.frontend.record import record
from merakc.ir.graph import Graph, TensorSpec
from merakc.machines.cluster import NOMINAL_CPU
from merakc.passes.autodiff import by_call
from merakc.passes.autodiff import differentiate as module
from merakc.passes.pipeline import differentiate
from tests.frontend.small import Small, linear, randn
from tests.passes.autodiff.test_tracer import Blind


def graph_of(forward: Callable[..., Tensor]) -> Graph:
    """The recording of a function of a batch `[4, 6]`."""
    parts: dict[str, Any] = {
        "a": linear(),
        "b": linear(),
        "c": linear(),
        "w": nn.Parameter(randn(6)),
    }
    return record(Small(forward, **parts), (randn(4, 6),), {}).graph


def repeated(m: Any, x: Tensor) -> Tensor:
    """Layers that are equal, with draws that are not, and values that are read several times."""
    for layer in (m.a, m.b, m.c):
        y = nn.functional.dropout(layer(x).relu(), 0.5)
        x = x + y * y + m.w
    return x.square().mean()


def parted(m: Any, x: Tensor) -> Tensor:
    """Several results of a call, of which one has no gradient, and one is read as it lies."""
    one, other, _ = m.a(x).t().split([1, 2, 3])
    return (other[1:] * one).sum() + m.w.detach().sum() * m.b(x)[:, ::2].sum()


def made(m: Any, x: Tensor) -> Tensor:
    """Tensors of Python's numbers, and calls without gradients."""
    with torch.no_grad():
        scale = m.a(x).abs().amax()
    table = torch.tensor([1.0, 2, 3, 4, 5, 6], dtype=x.dtype)
    return (m.b(x) * table / scale * torch.tensor(0.5)).logsumexp(0).sum()


@pytest.mark.parametrize("forward", [repeated, parted, made])
def test_the_joint_graph_is_that_of_the_whole(
    forward: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = graph_of(forward)
    asked: list[int] = []
    run = by_call.ByCall.backward
    monkeypatch.setattr(
        by_call.ByCall, "backward", lambda self, r: asked.append(len(self._tape)) or run(self, r)
    )
    found = differentiate(graph)
    assert asked
    for traces in (module, by_call):
        monkeypatch.setattr(traces, "Tracer", Blind)
    wanted = differentiate(graph)
    assert str(found.forward) == str(wanted.forward)
    assert str(found.backward) == str(wanted.backward)


def test_equal_calls_are_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    traced: list[str] = []
    trace = by_call.ByCall._traced
    monkeypatch.setattr(
        by_call.ByCall, "_traced", lambda self, *a: traced.append("") or trace(self, *a)
    )
    graph = graph_of(repeated)
    differentiate(graph)
    assert len(traced) < len(graph.nodes) * 2 / 3


def test_a_graph_of_other_shapes_than_its_calls_give_is_refused() -> None:
    graph = graph_of(repeated)
    first = replace(graph.nodes[0], outputs=(TensorSpec((4, 5), torch.float64),))
    with pytest.raises(AssertionError, match="gives"):
        differentiate(replace(graph, nodes=(first, *graph.nodes[1:])))


class Bags(nn.Module):
    """Of whose bags torch notes sizes that are others on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag(6, 4, mode="mean")

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.bags(ids).square().sum()


def test_results_that_nothing_reads_may_have_other_sizes() -> None:
    plain, ids = Bags(), torch.arange(12).reshape(4, 3) % 6
    model = merakc.auto_parallel(copy.deepcopy(plain), ids, cluster=NOMINAL_CPU)
    for one in (model, plain):
        one(ids).backward()
    assert torch.allclose(model.bags.weight.grad, plain.bags.weight.grad)
