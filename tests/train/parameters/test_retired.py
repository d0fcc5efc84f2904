from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from merakc.errors import ConfigError
from merakc.train.parameters.retired import check_idle, retire


def test_every_use_of_a_retired_parameter_is_refused() -> None:
    p = nn.Parameter(torch.ones(3))
    optimizer, held = torch.optim.SGD([p], lr=0.1), {p: 1}
    loss = (p * 2).sum()
    retire(p, "it is gone")
    assert held[p] == 1  # it can be looked for
    assert repr(p) == "Retired('it is gone')"
    for use in (
        loss.backward, optimizer.step, optimizer.zero_grad, p.sum, lambda: p.data, lambda: p.shape,
        lambda: copy.deepcopy(p), lambda: nn.utils.clip_grad_norm_([p], 1.0),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match="it is gone"):
            use()


def test_a_parameter_with_a_gradient_or_a_hook_is_not_idle() -> None:
    p = nn.Parameter(torch.ones(3))
    check_idle("p", p, "this")
    p.register_post_accumulate_grad_hook(lambda _: None)
    check_idle("p", p, "this", own_hooks=1)
    with pytest.raises(ConfigError, match="a hook is registered on 'p', which this replaces"):
        check_idle("p", p, "this")
    p.grad = torch.zeros(3)
    with pytest.raises(ConfigError, match="'p' has a gradient, of which this cannot say"):
        check_idle("p", p, "this", own_hooks=1)
