"""Timed steps, tried on the CPU with a small model."""

from __future__ import annotations

import pytest
import torch

from merakc.gpu_check import speed


@pytest.mark.parametrize("kind", ["eager", "merakc"])
def test_a_step_is_timed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "STEPS", 2)
    found = speed.run(kind, torch.device("cpu"))
    assert 0 < found["least_s"] <= found["step_s"] <= found["most_s"]
    assert found["tokens_per_s"] == pytest.approx(found["tokens"] / found["step_s"])
    assert found["pass_s"] > 0
    assert ("predicted_s" in found) == (kind == "merakc")
    assert torch.get_default_dtype() is torch.float32
