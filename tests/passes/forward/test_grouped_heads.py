"""Keys and values that are repeated for groups of queries are read as they were."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from merakc.frontend.record import record
from merakc.ir.graph import Graph
from merakc.passes.autodiff.interpret import interpret
from merakc.passes.forward.grouped_heads import ATTENTION, with_grouped_heads

BATCH, HEADS, GROUPS, LENGTH, DIM = 2, 6, 2, 5, 4
SHARED = (BATCH, GROUPS, LENGTH, DIM)
Repeat = Callable[[Tensor], Tensor]


def by_expanding(x: Tensor) -> Tensor:
    """As transformers does."""
    wide = x[:, :, None, :, :].expand(BATCH, GROUPS, HEADS // GROUPS, LENGTH, DIM)
    return wide.reshape(BATCH, HEADS, LENGTH, DIM)


def copied(x: Tensor) -> Tensor:
    wide = x.unsqueeze(-3).expand(-1, -1, HEADS // GROUPS, -1, -1).contiguous()
    return wide.view(BATCH, HEADS, LENGTH, DIM)


def of_other_groups(x: Tensor) -> Tensor:
    """Head i reads head i % g, which grouped attention does not."""
    wide = x[:, None].expand(BATCH, HEADS // GROUPS, GROUPS, LENGTH, DIM)
    return wide.reshape(BATCH, HEADS, LENGTH, DIM)


def of_rows(x: Tensor) -> Tensor:
    """Every key stands there several times, one behind the other."""
    wide = x[:, :, :, None].expand(BATCH, GROUPS, LENGTH, HEADS // GROUPS, DIM)
    return wide.reshape(BATCH, HEADS, LENGTH, DIM)


def without_gradient(x: Tensor) -> Tensor:
    with torch.no_grad():
        return by_expanding(x)


class Attention(nn.Module):
    """Attention of shared keys and values, each repeated in its way."""

    def __init__(self, key: Repeat, value: Repeat) -> None:
        super().__init__()
        self.key, self.value = key, value
        self.shift = nn.Parameter(torch.zeros(()))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys = self.key(k + self.shift)
        return F.scaled_dot_product_attention(q, keys, self.value(v), is_causal=True)


def values(model: nn.Module, given: tuple[Tensor, ...], graph: Graph) -> dict[str, Tensor]:
    """What enters a graph, by name."""
    state = dict(zip("012", given, strict=True)) | dict(model.named_parameters())
    return {i.name: state[i.target] for i in graph.inputs}


@pytest.mark.parametrize(
    ("key", "value", "grouped"),
    [
        (by_expanding, by_expanding, True),
        (copied, by_expanding, True),
        (by_expanding, of_other_groups, False),
        (of_other_groups, of_other_groups, False),
        (of_rows, by_expanding, False),
        (without_gradient, by_expanding, False),
    ],
)
def test_only_what_groups_read_is_read_so(key: Repeat, value: Repeat, grouped: bool) -> None:
    model = Attention(key, value)
    given = torch.randn(BATCH, HEADS, LENGTH, DIM), torch.randn(SHARED), torch.randn(SHARED)
    graph = record(model, given, {}).graph
    found = with_grouped_heads(graph)
    found.verify()
    (node,) = (n for n in found.nodes if n.op == ATTENTION)
    heads = {found.specs()[ref].shape[1] for ref in node.args[1:3]}
    assert heads == ({GROUPS} if grouped else {HEADS})
    assert (len(found.nodes) < len(graph.nodes)) is grouped
    (out,) = interpret(found, values(model, given, found))
    torch.testing.assert_close(out, model(*given), rtol=0, atol=1e-6)


def test_keys_that_something_else_reads_stay_too() -> None:
    class Both(Attention):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return super().forward(q, k, v) + by_expanding(k)

    model = Both(by_expanding, by_expanding)
    given = torch.randn(BATCH, HEADS, LENGTH, DIM), torch.randn(SHARED), torch.randn(SHARED)
    found = with_grouped_heads(record(model, given, {}).graph)
    found.verify()
    (out,) = interpret(found, values(model, given, found))
    torch.testing.assert_close(out, model(*given), rtol=0, atol=1e-6)
