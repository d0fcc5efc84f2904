"""Where the loss is looked for."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from merakc.frontend.values.results import find_loss

LOSS = torch.tensor(2.0)
LOGITS = torch.ones(2, 3)


@pytest.mark.parametrize(
    "out",
    [
        LOSS,
        (LOSS, LOGITS),
        (LOGITS, LOSS),
        (torch.ones(1, 1), LOSS),
        {"logits": LOGITS, "nll": LOSS},
        ({"logits": LOGITS}, [LOSS, LOSS]),
        {"nll": LOSS, "again": LOSS},
        [LOSS],
        {"logits": LOGITS, "loss": LOSS},
        SimpleNamespace(loss=LOSS, logits=LOGITS),
    ],
)
def test_found(out: object) -> None:
    assert find_loss(out) is LOSS


@pytest.mark.parametrize(
    "out",
    [
        LOGITS,
        {"logits": LOGITS},
        (),
        None,
        torch.tensor(1),
        {"loss": LOGITS},
        SimpleNamespace(loss=None, other=LOSS),
        {"loss": None, "other": LOSS},
        {"a": torch.tensor(1.0), "b": torch.tensor(2.0)},
    ],
)
def test_not_found(out: object) -> None:
    assert find_loss(out) is None


@dataclass
class Out:
    """A dataclass that nobody has registered."""

    logits: torch.Tensor
    nll: Any = None


def test_the_number_that_can_be_trained_on() -> None:
    trained, metric = torch.tensor(1.0, requires_grad=True), torch.tensor(2.0)
    for out in ((metric, trained), {"a": metric, "b": trained}, Out(metric, Out(LOGITS, trained))):
        assert find_loss(out) is trained
    assert find_loss((metric, trained), lambda x: x is metric) is metric
    assert find_loss((trained, trained * 2)) is trained


def test_of_several_by_names_the_loss_is_made_outside() -> None:
    first, second = (torch.tensor(x, requires_grad=True) for x in (1.0, 2.0))
    assert find_loss({"nll": first, "kl": second, "metric": LOSS}) is None
