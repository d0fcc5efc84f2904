"""Recordings that leave turns out have to be the whole one without them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from merakc.frontend.hits import alike
from merakc.frontend.record import record
from tests.frontend.hits.hit_loops import EXPERTS, model_of, of_one_hot
from tests.frontend.hits.test_visits import Inside
from tests.frontend.small import WIDTH, randn


def _collected(m: Any, x: torch.Tensor) -> torch.Tensor:
    chosen, parts = m.router(x).argmax(-1), []
    mask = F.one_hot(chosen, EXPERTS)
    out = torch.zeros_like(x)
    for k in mask.sum(0).nonzero().squeeze(1):
        (rows,) = torch.where(mask[:, k])
        out.index_add_(0, rows, m.experts[k](x[rows]))
        parts.append(x.sum())
    return out.square().sum() + torch.stack(parts).sum()


def test_a_forward_that_fails_without_turns_runs_as_it_is() -> None:
    made = record(Inside(_collected), (randn(4, WIDTH),), {})
    assert [n.module for n in made.graph.nodes if "opaque" in n.op] == ["looped"]


def test_all_turns_are_left_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And never none."""
    left = [{k for k in range(EXPERTS) if out(k)} for out in alike.LEFT_OUT]
    assert left == [{0, 1, 2, 3, 4}, {1, 3}, {0, 2, 4}]
    asked: list[int] = []
    monkeypatch.setattr(alike, "LEFT_OUT", (lambda k: bool(asked.append(k)) or k > 1,))
    record(model_of(of_one_hot), (randn(4, WIDTH),), {})
    assert {*asked} == {*range(EXPERTS)}
