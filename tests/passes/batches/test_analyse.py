"""What was found of two recordings holds for others, or they are refused."""

from __future__ import annotations

import pytest
import torch

from merakc.errors import RecordError
from merakc.passes.batches.analyse import retaken
from merakc.passes.batches.states import Kind
from tests.passes.batches.forwards import Loss, Small, analysed, make_batch, recorded


def two(loss: Loss, samples: int) -> tuple[object, object]:
    model, batch = Small(loss), make_batch()
    return recorded(model, batch, samples), recorded(model, batch, 8)


def mean(m: Small, z: torch.Tensor, b: dict[str, torch.Tensor]) -> torch.Tensor:
    return (m.norm(z) * b["weight"][:, None] / len(z)).sum()


@pytest.mark.parametrize("samples", [2, 5])
def test_other_numbers_of_samples_have_the_same_states(samples: int) -> None:
    found = analysed(Small(mean), make_batch(), 3)
    part, whole = two(mean, samples)
    again = retaken(found, part, whole, samples, 8)  # type: ignore[arg-type]
    assert again.states == found.states
    assert (again.samples, again.total, again.share) == (samples, 8, samples / 8)
    (quotient,) = [n for n in again.part.nodes if n.op == "aten.div.Tensor"]
    assert again.makers[quotient.name] == quotient
    assert quotient.args[1] == samples
    assert again.twins[quotient.name].args[1] == 8
    assert [text.partition(",")[0] for text in again.assumed] == [
        "batch norm is over each micro-batch by itself"
    ]


def width(m: Small, z: torch.Tensor, b: dict[str, torch.Tensor]) -> torch.Tensor:
    """A dim that is 4 for some numbers of samples, and 3 for others."""
    return torch.nn.functional.pad(z, (0, len(z) % 2)).sum()


def table(m: Small, z: torch.Tensor, b: dict[str, torch.Tensor]) -> torch.Tensor:
    """A tensor of Python's that is another for few samples."""
    return (z * torch.tensor([1.0, 2.0, 3.0 if len(z) > 3 else 4.0])).sum()


@pytest.mark.parametrize(
    ("loss", "text"),
    [(width, "a value is of shape .* for 5 samples"), (table, "has other values for 3 samples")],
)
def test_what_does_not_follow_for_another_number_is_refused(loss: Loss, text: str) -> None:
    found = analysed(Small(loss), make_batch(), 4)
    part, whole = two(loss, 5 if loss is width else 3)
    with pytest.raises(RecordError, match=text):
        retaken(found, part, whole, 5 if loss is width else 3, 8)  # type: ignore[arg-type]


def test_a_value_is_shown_by_its_shapes_alone() -> None:
    found = analysed(Small(lambda m, z, b: (z @ z.T).softmax(1).sum()), make_batch(), 3)
    (node,) = [n for n in found.part.nodes if n.op == "aten.softmax.int"]
    (ref,) = node.made
    assert found.states[ref].kind is Kind.COUPLED
    assert found.shown(ref).kind is Kind.COUPLED, "samples by samples"
    (first,) = [n for n in found.part.nodes if n.op == "aten.linear.default"]
    assert found.shown(first.made[0]).kind is Kind.ROWS
