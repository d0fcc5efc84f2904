"""Attention with sinks that is written out is one call, and computes the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from merakc.frontend.record import record
from merakc.ir.graph import Graph, Ref
from merakc.passes.autodiff.interpret import interpret
from merakc.passes.forward.grouped_heads import ATTENTION
from merakc.passes.forward.sinks import with_sinks

BATCH, HEADS, LENGTH, DIM = 2, 3, 5, 4
Step = Callable[..., Tensor]


def softmax_of(scores: Tensor) -> Tensor:
    """As GPT-OSS: the largest score of each row is taken off first."""
    return (scores - scores.max(-1, keepdim=True).values).softmax(-1)


def sinks_of(model: Sinks, scores: Tensor) -> Tensor:
    """One score a head, for every query."""
    return model.sinks.reshape(1, -1, 1, 1).expand(len(scores), -1, scores.shape[2], -1)


class Sinks(nn.Module):
    """Attention with sinks; any of its steps may be another."""

    def __init__(self, **steps: Step) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.sinks = nn.Parameter(torch.randn(HEADS, dtype=torch.float64))
        self.bias = nn.Parameter(torch.randn(LENGTH, LENGTH, dtype=torch.float64))
        self.steps = steps

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        """Of [b, h, s, d] each, with a mask of floats."""
        step = self.steps.get
        scores = step("scores", lambda m, q, k: q @ k.transpose(2, 3) * 0.3)(self, q, k)
        scores = step("masked", lambda m, scores, mask: scores + mask)(self, scores, mask)
        joined = torch.cat([scores, step("sinks", sinks_of)(self, scores)], dim=-1)
        shares = step("softmax", softmax_of)(joined)
        shares = step("shares", lambda shares: shares[..., :-1])(shares)
        out = shares @ v
        return (out + step("beside", lambda shares, joined: 0.0)(shares, joined)).square().sum()


def graph_of(**steps: Step) -> Graph:
    return record(Sinks(**steps), given(), {}).graph


def given() -> tuple[Tensor, ...]:
    torch.manual_seed(1)
    q, k, v = torch.randn(3, BATCH, HEADS, LENGTH, DIM, dtype=torch.float64)
    seen = torch.rand(BATCH, 1, LENGTH, LENGTH) < 0.6
    mask = torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, -torch.inf)
    mask[0, 0, 0] = -torch.inf  # a query that sees its sink alone
    return q, k, v, mask


def results(graph: Graph) -> list[Tensor]:
    """The loss, and the gradients of what is learned and of what is attended to."""
    own = {**dict(zip("0123", given(), strict=True)), "sinks": Sinks().sinks.detach()}
    mask = own.pop("3")
    leaves = {name: value.clone().requires_grad_() for name, value in own.items()}
    (loss,) = interpret(graph, {**leaves, "3": mask})
    return [loss, *torch.autograd.grad(loss, list(leaves.values()))]


@pytest.mark.parametrize(
    "steps",
    [
        {},
        {"softmax": lambda x: x.softmax(-1)},
        {"softmax": lambda x: torch.nn.functional.softmax(x - x.amax(3, keepdim=True), dim=3)},
        {"masked": lambda m, scores, mask: scores},
        {"masked": lambda m, scores, mask: mask + scores},
        {"scores": lambda m, q, k: q @ k.transpose(-1, -2) / 2},
        {"scores": lambda m, q, k: (q * 0.3) @ k.mT},
        {"sinks": lambda m, s: m.sinks[:, None, None].expand(BATCH, HEADS, LENGTH, 1)},
        {"shares": lambda shares: shares[..., :LENGTH].to(torch.float64)},
    ],
)  # fmt: skip
def test_it_is_one_call_that_computes_the_same(steps: dict[str, Step]) -> None:
    graph = graph_of(**steps)
    found = with_sinks(graph)
    found.verify()
    (node,) = (n for n in found.nodes if n.op == ATTENTION)
    assert node.args[7] == Ref("sinks")
    assert not any("softmax" in n.op for n in found.nodes)
    pairs = zip(results(graph), results(found), strict=True)
    for wanted, made in pairs:
        assert (wanted - made).abs().max() < 1e-12, (wanted, made)


@pytest.mark.parametrize(
    "steps",
    [
        {"masked": lambda m, scores, mask: scores + m.bias},  # would get no gradient
        {"masked": lambda m, scores, mask: scores + (mask == 0)},  # adds one, and hides nothing
        {"shares": lambda shares: (shares[..., :-1] * 9).to(torch.int32).to(torch.float64)},
        {"shares": lambda shares: shares[..., :-1].to(torch.int32).to(torch.float64)},
        {"softmax": lambda x: torch.no_grad()(softmax_of)(x)},
        {"scores": lambda m, q, k: torch.no_grad()(lambda: q @ k.transpose(2, 3) * 0.3)()},
        {"sinks": lambda m, s: torch.no_grad()(sinks_of)(m, s)},
        {"sinks": lambda m, scores: scores.mean(-1, keepdim=True)},  # one of each query
        {"sinks": lambda m, s: m.sinks.sum().view(1, 1, 1, 1).expand(BATCH, HEADS, LENGTH, 1)},
        {"shares": lambda shares: shares[..., 1:]},
        {"shares": lambda shares: torch.dropout(shares[..., :-1], 0.1, True)},
        {"softmax": lambda x: x.softmax(-2)},
        {"softmax": lambda x: (x - x.max(2, keepdim=True).values).softmax(-1)},
        {"softmax": lambda x: (x - x.mean(-1, keepdim=True)).softmax(-1)},
        {"scores": lambda m, q, k: q @ k.transpose(2, 3).tanh()},
        {"beside": lambda shares, joined: shares.sum()},
        {"beside": lambda shares, joined: joined.sum()},
    ],
)  # fmt: skip
def test_what_computes_something_else_is_left(steps: dict[str, Step]) -> None:
    graph = graph_of(**steps)
    assert with_sinks(graph) is graph
