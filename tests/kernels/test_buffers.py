"""A value that was written under `no_grad`: the new value, with the gradient of the old one."""

from __future__ import annotations

import pytest
import torch

from merakc.kernels.buffers import overwritten


def test_it_has_the_new_value_and_the_old_gradient() -> None:
    before = torch.tensor([-1.0, float("inf"), 2.0], requires_grad=True)
    now = before.detach().clamp(0, 1)
    made = overwritten(before, now)
    assert torch.equal(made, now)
    (grad,) = torch.autograd.grad((made * torch.tensor([1.0, 2.0, 3.0])).sum(), before)
    assert grad.tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("channels_last", [False, True])
def test_a_norm_gives_the_statistics_of_its_batch(dims: int, channels_last: bool) -> None:
    """What torch's op writes, to the last bit, and what its backward wants."""
    torch.manual_seed(0)
    x = torch.randn(3, 4, *range(5, 5 + dims))
    if channels_last:
        x = x.transpose(1, -1).contiguous().transpose(1, -1)
    weight, bias = torch.randn(2, 4).unbind()
    mean, variance = torch.zeros(4), torch.zeros(4)
    wanted = torch.native_batch_norm(x, weight, bias, mean, variance, True, 1.0, 1e-3)
    found = torch.ops.merakc.batch_norm_statistics(x, weight, bias, 1e-3)
    for one, other in zip(found, (*wanted, variance, mean), strict=True):
        assert torch.equal(one, other)
    torch.testing.assert_close(found[3:], torch.var_mean(x, [0, *range(2, 2 + dims)]))
    like = torch.ops.merakc.batch_norm_statistics(x.to("meta"), weight, bias, 1e-3)
    assert [one.shape for one in like] == [one.shape for one in found]
