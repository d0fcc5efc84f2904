"""Where no experts are found, the error says what came nearest."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from merakc.errors import ShardError
from merakc.frontend.record import record
from merakc.passes.pipeline import RECORDED
from merakc.passes.running import run_passes
from merakc.passes.sharding.experts.refusals import nearest
from merakc.passes.sharding.shard import shard
from tests.passes.sharding.experts import mixtures
from tests.passes.sharding.experts.looped import Form, Looped, graph_of


def _dense(m: Looped, x: Tensor, chances: Tensor) -> Tensor:
    weights, chosen = chances.topk(2, -1)
    gate = torch.zeros_like(chances).scatter(1, chosen, weights)
    return sum((gate[:, k, None] * e(x) for k, e in enumerate(m.experts)), torch.zeros_like(x))


def _any_choice(m: Looped, x: Tensor, chances: Tensor) -> Tensor:
    chosen, out = chances.topk(2, -1).indices, torch.zeros_like(x)
    for k, expert in enumerate(m.experts):
        mask = (chosen == k).any(-1)
        out[mask] = expert(x[mask])
    return out


class _OnlyHit(nn.Module):
    """A loop over the experts that have rows."""

    def __init__(self, experts: nn.ModuleList) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        """What they make of them."""
        out = torch.zeros_like(x)
        for k, expert in enumerate(self.experts):
            if (mask := chosen == k).any():
                out[mask] = expert(x[mask])
        return out


def _only_hit() -> Any:
    model = Looped(lambda m, x, chances: m.loop(x, chances.argmax(-1)))
    model.loop = _OnlyHit(model.experts)
    del model.experts
    ids = torch.zeros(2, 6, dtype=torch.long)
    return record(model.double(), (ids, ids), {}).graph


def _counted(ends: Any) -> Any:
    return mixtures.graph_of(ends=ends)


@pytest.mark.parametrize(
    ("graph", "said"),
    [
        (lambda: graph_of(_dense), r"topk.default at .*test_refusals.py:\d+ chooses"),
        (
            lambda: graph_of(_any_choice),
            r"test_refusals.py:\d+: a row of two experts is what the last one writes",
        ),
        (_only_hit, r"test_refusals.py:\d+: 'loop' runs as it is, since .*; .*let it run over all"),
        (
            lambda: _counted(lambda ids: torch.bincount(ids).cumsum(0).int()),
            r"test_refusals.py:\d+: aten.bincount.default .*minlength=experts",
        ),
        (
            lambda: _counted(lambda ids: torch.unique(ids, return_counts=True)[1].cumsum(0).int()),
            r"test_refusals.py:\d+: aten._unique2.default .*minlength=experts",
        ),
    ],
)
def test_the_line_is_named(graph: Any, said: str) -> None:
    found = run_passes(RECORDED, graph())
    with pytest.raises(ShardError, match=said):
        shard(found, 1, cp=2, expert_parallel=True)


def test_a_model_without_choices_has_none() -> None:
    form: Form = lambda m, x, chances: x * chances.amax(-1, keepdim=True)  # noqa: E731
    assert nearest(graph_of(form)) == ""
