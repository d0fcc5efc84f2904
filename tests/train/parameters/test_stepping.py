"""An optimizer's step is known while it runs, and no longer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from merakc.train.parameters.stepping import is_stepping, watch_optimizers


class Looks(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        del closure
        assert is_stepping()
        raise ValueError


def test_a_step_is_known_until_it_ends_in_an_error_too() -> None:
    watch_optimizers()
    assert not is_stepping()
    with pytest.raises(ValueError):  # noqa: PT011
        Looks([nn.Parameter(torch.ones(1))], lr=0.1).step()
    assert not is_stepping()
