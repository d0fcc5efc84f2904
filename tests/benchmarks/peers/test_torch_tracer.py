"""Torch's tracer refuses the model today (see `benchmarks.stock_models`): what it is asked for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.peers import torch_tracer
from tests.benchmarks.peers.comparing import TINY


def test_asks_for_cuts_between_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def pipeline(model: object, **given: Any) -> None:
        asked.update(given)
        raise RuntimeError("the tracer refuses")

    monkeypatch.setattr(torch_tracer, "pipeline", pipeline)
    with pytest.raises(RuntimeError, match="the tracer refuses"):
        torch_tracer.build(replace(TINY, pp=2, micro_batches=2), "Schedule1F1B", 0)
    assert list(asked["split_spec"]) == ["model.layers.1"]
    assert asked["mb_kwargs"]["input_ids"].shape == (1, 8)
