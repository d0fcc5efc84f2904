"""`auto_parallel` and steps on CUDA tensors that hold nothing: two layouts of all."""

from __future__ import annotations

import pytest
import torch

from benchmarks.gpu_path import fakes
from benchmarks.gpu_path.races import Layout
from merakc.train import steps

pytestmark = pytest.mark.skipif(
    torch.version.cuda is None and fakes.compiler() is None, reason="needs a C++ compiler"
)
LAYOUT = Layout(2, 1, 2, {"micro_batches": 2, "state_shards": "zero-2", "precision": "bf16-mixed"})


def test_layout() -> None:
    found = fakes.faked(LAYOUT)
    assert not found.faults
    assert found.calls > 100
    assert found.aside > 0
    assert found.waits == fakes.MOST_WAITS


def test_a_batch_that_is_left_on_the_host_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "bring", lambda tensor, device: tensor.to(device))
    (blocked,) = fakes.faked(Layout(1, 1, 1, {"micro_batches": 2})).faults
    assert "copies a step" in blocked
