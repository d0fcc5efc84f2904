"""Calls with the whole job's batch give what one process computes of it, results included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import merakc
from merakc.equality.ranks import run_ranks
from merakc.errors import MismatchError
from merakc.machines.cluster import NOMINAL_CPU

SAMPLES, WIDTH = 7, 6
Answer = dict[str, Any]


class Net(nn.Module):
    """A loss, and an output for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 12), nn.Tanh(), nn.Linear(12, 3))

    def forward(self, x: torch.Tensor, items: torch.Tensor) -> Answer:
        """The loss is a sum over a number that is the same for all samples."""
        out = self.net(x)
        told = {"count": len(x), "shape": out.shape}
        return {"loss": out.square().sum() / items, "out": out, "mean": out.mean(), "told": told}


def made() -> tuple[Net, torch.Tensor]:
    torch.manual_seed(0)
    return Net().double(), torch.randn(SAMPLES, WIDTH).double()


def on_ranks() -> tuple[float, Answer, Answer]:
    net, x = made()
    items = torch.tensor(11.0).double()
    model: Any = merakc.auto_parallel(net, (x[:4], items), cluster=NOMINAL_CPU, dp=2)
    model.read_whole_batches()
    found = model(x, items)
    found["loss"].backward()
    answer = model.predict(x, items)
    return found["loss"].item(), answer, model.full_gradients()


def test_calls_take_the_whole_batch() -> None:
    net, x = made()
    wanted = net(x, torch.tensor(11.0).double())
    wanted["loss"].backward()
    ranks = run_ranks(2, on_ranks)
    told = wanted.pop("told")
    for loss, answer, _ in ranks:
        assert answer.pop("told") == told
        assert loss == pytest.approx(wanted["loss"].item(), rel=1e-12)
        for name, value in wanted.items():
            torch.testing.assert_close(answer[name], value.detach(), rtol=1e-12, atol=1e-12)
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(ranks[0][2][name], parameter.grad, rtol=1e-12, atol=1e-12)


class Coupled(Net):
    """Its samples meet in the loss, and its forward writes the sum and the number of calls."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor, items: torch.Tensor) -> Answer:
        """A loss of all pairs."""
        found = super().forward(x, items)
        out = found["out"]
        if self.training:
            self.seen += out.detach().sum(0)
            self.calls += 1
        return {**found, "loss": found["loss"] + (out @ out.T).logsumexp(1).mean()}


def stepped(options: dict[str, Any] | None, steps: int = 2) -> tuple[list[Any], Answer]:
    """Steps and evaluations of a batch of four, and of `steps` with one sample, and the state."""
    torch.manual_seed(0)
    model: Any = Coupled().double()
    x, items = torch.randn(4, WIDTH).double(), torch.tensor(11.0).double()
    if options is not None:
        model = merakc.auto_parallel(
            model, (x, items), cluster=NOMINAL_CPU, whole_batches=True, **options
        )
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
    for given in [x, *x[:steps].split(1)]:
        loss = model.train()(given, items)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model.eval()
            answer = model(given, items) if options is None else model.predict(given, items)
            found += [loss.item(), answer, model(given, items)["loss"].item()]
    return found, model.state_dict() if options is None else model.full_state_dict()


@pytest.mark.parametrize(
    "layout",
    [{"dp": 2}, {"dp": 2, "state_shards": "zero-3"}, {"dp": 2, "pp": 2, "micro_batches": 2}],
)
def test_each_rank_runs_all_of_a_batch_of_fewer_samples_than_ranks(layout: dict[str, Any]) -> None:
    wanted, weights = stepped(None)
    ranks = run_ranks(4 if "pp" in layout else 2, stepped, layout)
    for found, _ in ranks:
        for ours, theirs in zip(found, wanted, strict=True):
            if isinstance(theirs, float):
                assert ours == pytest.approx(theirs, rel=1e-10)
                continue
            assert ours.pop("told") == theirs["told"]
            for name, value in ours.items():
                torch.testing.assert_close(value, theirs[name], rtol=1e-10, atol=1e-10)
    for name, value in ranks[0][1].items():
        torch.testing.assert_close(value, weights[name], rtol=1e-10, atol=1e-10)


def test_it_stays_one_batch_for_all_ranks() -> None:
    """Many steps bring no warning that ranks are given the same batches, which would be an error;
    ranks that are given other batches are told.
    """
    for found, _ in run_ranks(2, stepped, {"dp": 2}, 4):
        assert len(found) == 15
    for said in run_ranks(2, unlike):
        assert "these take [1, 2] of it; give every rank the same batch" in said


def unlike() -> str:
    net, x = made()
    items = torch.tensor(11.0).double()
    model: Any = merakc.auto_parallel(
        net, (x[:4], items), cluster=NOMINAL_CPU, dp=2, whole_batches=True
    )
    with pytest.raises(MismatchError) as refused:
        model(x[: 1 + 3 * model.rank], items)
    return str(refused.value)
