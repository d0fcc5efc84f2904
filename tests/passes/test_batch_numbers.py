"""Numbers in a loss that are the size of the batch, and numbers that are weights."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from merakc.batches import doubled
from merakc.errors import RecordError
from merakc.frontend.record import record
from merakc.ir.graph import Graph, OutputKind
from merakc.passes.batch_numbers import has_numbers, settle_numbers
from merakc.passes.interpret import interpret
from merakc.passes.weigh_loss import MICRO_BATCH_SCALE, weigh_loss
from merakc.planner import training_graph

SAMPLES, WIDTH, MICRO_BATCHES = 6, 3, 3
Loss = Callable[[Tensor], Tensor]


class Model(nn.Module):
    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.loss = loss
        self.weight = nn.Parameter(torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """Each of the losses is a sum over the samples, up to a factor."""
        return {"loss": self.loss(torch.sin(x * self.weight))}


def recorded(loss: Loss, samples: int) -> Graph:
    x = torch.zeros(samples, WIDTH, dtype=torch.float64)
    graph = record(Model(loss), (x,), {}).graph
    (wide_args, _) = doubled((x,), {}, frozenset({"0"}))
    wide = record(Model(loss), wide_args, {}).graph
    return settle_numbers(graph, wide, samples) if has_numbers(graph) else graph


def total(loss: Loss, x: Tensor) -> Tensor:
    """What the losses of the micro-batches add up to."""
    model = Model(loss)
    graph = weigh_loss(training_graph(recorded(loss, SAMPLES // MICRO_BATCHES))).graph
    graph.verify()
    found = torch.zeros((), dtype=torch.float64)
    for part in x.chunk(MICRO_BATCHES):
        known = {"0": part, "weight": model.weight.detach()}
        known[MICRO_BATCH_SCALE] = torch.tensor(1 / MICRO_BATCHES, dtype=torch.float64)
        given = {i.name: known[i.target or i.name] for i in graph.inputs
                 if i.name not in graph.constants}  # fmt: skip
        values = dict(zip(graph.outputs, interpret(graph, given), strict=True))
        (own,) = (value for out, value in values.items() if out.kind is OutputKind.LOSS)
        found = found + own
    return found


LOSSES: dict[str, Loss] = {
    "a product with one over the samples": lambda y: y.square().sum() * (1 / len(y)),
    "a weight that is a product": lambda y: y.square().sum() * 0.5,
    "a weight that is a micro-batch's size": lambda y: y.square().sum() / 2,
    "a weight that is a micro-batch's elements": lambda y: y.square().sum() / 6,
    "a mean times the samples": lambda y: y.square().mean() * len(y),
    "a mean times the samples, weighed": lambda y: 3 * (y.square().mean() * len(y)),
    "divided by the elements": lambda y: y.square().sum() / y.numel(),
    "divided by half the samples": lambda y: y.square().sum() / (len(y) / 2),
    "two terms": lambda y: 0.1 * y.mean() + y.square().sum() * (2 / len(y)),
    "a mean with a weight": lambda y: 0.25 * y.square().mean(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_micro_batches_add_up(name: str) -> None:
    x = torch.linspace(-1, 2, SAMPLES * WIDTH, dtype=torch.float64).view(SAMPLES, WIDTH)
    wanted = Model(LOSSES[name])(x)["loss"].detach()
    torch.testing.assert_close(total(LOSSES[name], x), wanted, rtol=1e-13, atol=0)


def test_a_loss_without_numbers_is_left_alone() -> None:
    graph = record(Model(lambda y: y.sum()), (torch.zeros(2, WIDTH).double(),), {}).graph
    assert not has_numbers(graph)


def test_numbers_off_the_loss_are_left_alone() -> None:
    graph = record(
        Model(lambda y: (y / (y.square().mean() * len(y))).sum()),
        (torch.zeros(2, WIDTH).double(),), {},
    ).graph  # fmt: skip
    assert not has_numbers(graph)


def test_a_growing_number_is_refused() -> None:
    with pytest.raises(
        RecordError, match=r"scaled by 4 for 2 samples and by 16 for 4.*take a mean"
    ):
        recorded(lambda y: y.square().mean() * len(y) ** 2, 2)
