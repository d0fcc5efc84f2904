"""Numbers that leave the forward or go into arithmetic, and are never told to Python."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from merakc.errors import RecordError
from merakc.frontend.record import record
from tests.frontend.against_eager import check, inputs_of, run_graph
from tests.frontend.small import Small, linear, randn

MASK = torch.arange(6) < torch.tensor([6, 3, 5, 2])[:, None]


def by_count(s: Any, y: Tensor, m: Tensor) -> Tensor:
    return (y * m).pow(2).sum() / m.sum().item()


def by_larger(s: Any, y: Tensor, m: Tensor) -> Tensor:
    return (y * m).pow(2).sum() / max(m.sum().item(), 1)


def by_its_own(s: Any, y: Tensor, m: Tensor) -> Tensor:
    return (y * y.max().item()).sum() - y.mean().item() * 2.5


def by_a_power(s: Any, y: Tensor, m: Tensor) -> Tensor:
    return (y.abs() ** m.sum().item()).sum() + torch.full((2,), y.max().item()).sum()


def in_place(s: Any, y: Tensor, m: Tensor) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    total += m.sum()
    before = total.item()
    total += 5
    return y.pow(2).sum() / before


@pytest.mark.parametrize("forward", [by_count, by_larger, by_its_own, by_a_power, in_place])
def test_numbers_in_arithmetic(forward: Any) -> None:
    torch.manual_seed(0)
    model = Small(lambda s, x, m: forward(s, s.layer(x), m), layer=linear())
    recording = check(model, randn(4, 6), MASK, relative=1e-12)
    fewer = randn(4, 6), MASK & (torch.arange(6) < 2)
    found = run_graph(recording.graph, inputs_of(recording.graph, model, fewer, {}))
    torch.testing.assert_close(found.outputs["output"], model(*fewer).detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_number_does_not_widen_what_it_meets(dtype: torch.dtype) -> None:
    model = Small(lambda s, x: s.layer(x).sum() * x.double().sum().item(), layer=linear().to(dtype))
    recording = record(model, (torch.ones(4, 6, dtype=dtype),), {})
    assert recording.graph.specs()[recording.graph.outputs[0].ref].dtype == dtype


def test_an_accuracy_is_an_output() -> None:
    def forward(s: Any, x: Tensor, y: Tensor) -> Any:
        out = s.layer(x)
        right = (out.argmax(-1) == y).double().mean()
        return F.cross_entropy(out, y), right.item(), {"whole": round(right.item(), 2), "n": 3}

    torch.manual_seed(0)
    model, batch = Small(forward, layer=linear()), (randn(4, 6), torch.tensor([0, 1, 2, 3]))
    recording = record(model, batch, {})
    assert recording.outputs == ("0", "1", "2]['whole", 3)
    assert recording.numbers == {"1", "2]['whole"}
    found = run_graph(recording.graph, inputs_of(recording.graph, model, batch, {})).outputs
    _, right, more = model(*batch)
    assert (found["1"].item(), found["2]['whole"].item()) == (right, more["whole"])


def test_a_truth_of_a_parameter_is_refused() -> None:
    def forward(s: Any, x: Tensor) -> Any:
        y = s.layer(x)
        return y.sum() * (2 if (y > 0).any().item() is True else 3)

    with pytest.raises(RecordError, match="control flow depends on the data"):
        record(Small(forward, layer=linear()), (randn(4, 6),), {})
