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
    first.row.data.fill_(1.0)
    with pytest.raises(RecordError, match="was written to that is a view of 'frozen"):
        first(x=x)
    with pytest.raises(RecordError, match="the memory of 'scale' as torch"):
        merakc.auto_parallel(Viewed(torch.int32), {"x": x})


class Turned(nn.Module):
    """A loss by rows of buffers that lie otherwise than in the order of their elements."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.turned = nn.Linear(4, 4), nn.Buffer(torch.rand(4, 4).t())
        self.row, self.decayed = self.turned[1], [*self.layer.parameters()]

    def forward(self, x: Tensor) -> Tensor:
        """A scalar."""
        return (self.layer(x) * self.row).mean() + self.decayed[0].square().sum()


class Apart(Turned):
    """Of which a buffer is a column of a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.turned = nn.Buffer(torch.rand(4, 2)[:, 1])
        self.row = self.turned[1:2]


def test_views_are_the_same_in_later_recordings() -> None:
    plain, trained = Turned(), merakc.auto_parallel(Turned(), {"x": torch.ones(2, 4)})
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, trained)]
    for samples in (2, 3, 5):  # each is recorded
        losses = []
        for model, optimizer in zip((plain, trained), optimizers, strict=True):
            with torch.no_grad():
                model.turned.copy_(torch.arange(16.0).view(4, 4) / samples)
            losses.append(model(x=torch.ones(samples, 4)))
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(losses[1], losses[0])
    apart = merakc.auto_parallel(Apart(), {"x": torch.ones(2, 4)})
    with pytest.raises(RecordError, match="view of 'turned', whose elements do not lie close"):
        apart(x=torch.ones(3, 4))
