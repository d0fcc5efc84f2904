"""A value that was written under `no_grad`: the new value, with the gradient of the old one."""

from __future__ import annotations

import torch

from merakc.kernels.overwritten import overwritten


def test_it_has_the_new_value_and_the_old_gradient() -> None:
    before = torch.tensor([-1.0, float("inf"), 2.0], requires_grad=True)
    now = before.detach().clamp(0, 1)
    made = overwritten(before, now)
    assert torch.equal(made, now)
    (grad,) = torch.autograd.grad((made * torch.tensor([1.0, 2.0, 3.0])).sum(), before)
    assert grad.tolist() == [1.0, 2.0, 3.0]
