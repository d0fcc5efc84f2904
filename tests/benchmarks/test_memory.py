"""The peak of a step against what is known to be alive."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.memory import peak_live_bytes


def test_a_step_holds_parameters_gradients_and_state() -> None:
    model = nn.Linear(64, 64, bias=False)
    optimizer = torch.optim.Adam(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(1, 64)).sum().backward()
        optimizer.step()

    step()
    peak_bytes = peak_live_bytes(model, optimizer, step)
    weight_bytes = 64 * 64 * 4
    assert 4 * weight_bytes <= peak_bytes <= 8 * weight_bytes


def test_gradients_of_the_step_before_are_let_go() -> None:
    model = nn.Linear(64, 64, bias=False)
    optimizer = torch.optim.SGD(model.parameters())
    model(torch.ones(1, 64)).sum().backward()
    peak_bytes = peak_live_bytes(model, optimizer, lambda: optimizer.zero_grad())
    assert peak_bytes == 2 * 64 * 64 * 4
    model(torch.ones(1, 64)).sum().backward()

    def step() -> None:
        optimizer.zero_grad()
        torch.ones(64, 64)

    assert peak_live_bytes(model, optimizer, step) == 2 * 64 * 64 * 4
