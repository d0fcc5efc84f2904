"""Views that Python holds by itself: they have what is written to what they show."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import merakc
from merakc.errors import RecordError


class Viewed(nn.Module):
    """A loss by a view of a buffer, a part of a frozen weight, a distribution over a buffer, and
    weights and a buffer that stand in lists.
    """

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.frozen = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)
        self.mean, self.scale = nn.Buffer(torch.zeros(4)), nn.Buffer(torch.ones(2, 4))
        self.row = self.frozen.weight.data[1]
        self.turned = self.scale.view(dtype).t()[1:3]
        self.prior = torch.distributions.Normal(self.mean, torch.ones(4), validate_args=False)
        self.decayed, self.scales = [*self.layer.parameters()], [self.scale]

    def forward(self, x: Tensor) -> Tensor:
        """A scalar."""
        y = self.layer(x) * self.turned.sum() - self.row
        decay = torch.stack([p.square().sum() for p in self.decayed]).sum()
        return decay * self.scales[0].sum() - self.prior.log_prob(y).mean()


def test_views_of_parameters_and_buffers_have_what_is_written_to_them() -> None:
    x = torch.ones(2, 4)
    plain, first = Viewed(), merakc.auto_parallel(Viewed(), {"x": x})
    for number, trained in enumerate((first, first, copy.deepcopy(first))):
        for model in (plain, trained):
            with torch.no_grad():
                model.mean.fill_(number)
                model.scale[0].fill_(number)
                model.frozen.weight.fill_(2 + number)
            for parameter in model.parameters():
                parameter.grad = None
        loss, wanted = trained(x=x), plain(x)
        torch.testing.assert_close(loss, wanted)
        loss.backward()
        wanted.backward()
        for name, parameter in plain.layer.named_parameters():
            torch.testing.assert_close(trained.layer.get_parameter(name).grad, parameter.grad)
    first.row.fill_(1.0)
    with pytest.raises(RecordError, match="was written to that is a view of 'frozen"):
        first(x=x)
    with pytest.raises(RecordError, match="the memory of 'scale' as torch"):
        merakc.auto_parallel(Viewed(torch.int32), {"x": x})
