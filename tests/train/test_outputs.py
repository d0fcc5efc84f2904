"""A loss hands its gradients out once."""

from __future__ import annotations

import pytest
import torch

from merakc.errors import ConfigError
from merakc.train.outputs import HandOut


def test_gradients_are_handed_out_once() -> None:
    first, second = (torch.ones(2, requires_grad=True) for _ in range(2))
    waiting = [torch.full((2,), 2.0), None]
    loss = HandOut.apply(torch.tensor(3.0), waiting, None, first, second)
    assert loss.item() == 3.0
    (0.5 * loss).backward()
    assert not waiting
    assert first.grad is not None
    assert first.grad.tolist() == [1.0, 1.0]
    assert second.grad is None
    with pytest.raises(ConfigError, match="called twice on one loss"):
        loss.backward()


def test_gradients_have_no_history() -> None:
    own = torch.ones(2, requires_grad=True)
    loss = HandOut.apply(torch.tensor(3.0), [torch.full((2,), 2.0)], None, own)
    with pytest.raises(ConfigError, match="create_graph=True"):
        torch.autograd.grad(loss, own, create_graph=True)
    loss.backward()
    assert own.grad is not None
