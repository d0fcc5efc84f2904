"""A loss hands its gradients out once; what is not computed says so where it is used."""

from __future__ import annotations

import pytest
import torch

from merakc.errors import ConfigError
from merakc.train.outputs import HandOut, NotComputed


def test_gradients_are_handed_out_once() -> None:
    first, second = (torch.ones(2, requires_grad=True) for _ in range(2))
    loss = HandOut.apply(torch.tensor(3.0), [torch.full((2,), 2.0), None], first, second)
    assert loss.item() == 3.0
    (0.5 * loss).backward()
    assert first.grad is not None
    assert first.grad.tolist() == [1.0, 1.0]
    assert second.grad is None
    with pytest.raises(ConfigError, match="called twice on one loss"):
        loss.backward()


def test_an_output_that_is_not_computed() -> None:
    missing = NotComputed("logits")
    assert repr(missing) == "NotComputed('logits')"
    assert not hasattr(missing, "__array__")
    with pytest.raises(ConfigError, match=r"output 'logits' is not computed by model\(\.\.\.\)"):
        _ = missing.shape
