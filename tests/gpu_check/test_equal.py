"""Equality with eager training, tried on the CPU: it holds, and what is wrong is seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from merakc.gpu_check import equal
from merakc.gpu_check.equal import allowed, compare
from merakc.kernels import ops, scores


def test_ranks_that_share_a_device_are_equal_to_one_process() -> None:
    errors = compare("gpt2", device="cpu", ranks=2, dp=1, tp=2, pp=1)
    assert errors.keys() == {"loss", "gradient", "weight"}
    assert max(errors.values()) <= allowed()


def test_losses_in_blocks_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[int] = []
    real = scores.scores

    def counted(*given: Any) -> Any:
        called.append(1)
        return real(*given)

    monkeypatch.setitem(ops.DIRECT, "merakc.scores.default", counted)
    errors = compare("llama", device="cpu", dtype="float32", whole_scores_bytes=0)
    assert max(errors.values()) <= allowed("float32")
    assert called


def test_a_wrong_gradient_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    real: Callable[..., Any] = equal.train_plain

    def wrong(*given: Any, **more: Any) -> Any:
        found = real(*given, **more)
        name = next(iter(found.gradients[1]))
        found.gradients[1][name].mul_(1 + 1e-6)
        return found

    monkeypatch.setattr(equal, "train_plain", wrong)
    errors = compare("bert", device="cpu")
    assert errors["gradient"] > allowed() > errors["loss"]


def test_half_precision_is_allowed_more() -> None:
    assert allowed("float32") < allowed("float32", "bf16-mixed") == allowed("bfloat16")
    assert allowed(dtype="float64", micro_batches=4) == 1e-10


def test_tensors_end_on_the_cpu() -> None:
    found = equal.eager("llama", torch.float32, torch.device("cpu"))
    assert len(found.losses) == len(found.gradients) == equal.STEPS
    assert found.weights
