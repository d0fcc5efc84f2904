"""Training in one process: weighted losses, first writers of buffers, models without a loss."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from merakc.equality.plain import loss_of, train_plain
from merakc.errors import ConfigError


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.up = nn.BatchNorm1d(4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.up(self.norm(x)).square().mean()}


def _calls(parts: int) -> list[tuple[tuple[torch.Tensor], dict[str, object]]]:
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    return [((part,), {}) for part in x.chunk(parts)]


def test_losses_are_weighted_and_gradients_with_them() -> None:
    model = nn.Sequential(nn.Linear(4, 1), nn.Flatten(0), nn.Softplus())

    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x).mean()

    start = {n: p.clone() for n, p in model.state_dict().items()}
    whole = train_plain(Mean(), [_calls(1)], [[1.0]], writing_parts=1)
    model.load_state_dict(start)
    halves = train_plain(Mean(), [_calls(2)], [[0.5, 0.5]], writing_parts=2)
    assert halves.losses == pytest.approx(whole.losses, rel=1e-6)
    for name, value in whole.weights.items():
        assert not torch.equal(value, start[name.removeprefix("inner.")])
        torch.testing.assert_close(halves.weights[name], value)
    model.load_state_dict(start)
    uneven = train_plain(Mean(), [_calls(2)], [[1.0, 0.0]], writing_parts=2)
    assert uneven.losses != pytest.approx(whole.losses, rel=1e-3)


def test_only_the_first_parts_write_buffers() -> None:
    shares = [[0.25] * 4]
    all_, half = (
        train_plain(Normed(), [_calls(4)], shares, writing_parts=parts) for parts in (4, 2)
    )
    assert all_.losses == half.losses
    assert all_.buffers["norm.num_batches_tracked"] == 4
    assert half.buffers["norm.num_batches_tracked"] == 2


def test_a_model_without_a_loss_is_refused() -> None:
    with pytest.raises(ConfigError, match="Linear returns no loss for this batch"):
        loss_of(nn.Linear(4, 4), ((torch.ones(2, 4),), {}))
