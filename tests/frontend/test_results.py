"""Where the loss is looked for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from merakc.frontend.results import find_loss

LOSS = torch.tensor(2.0)
LOGITS = torch.ones(2, 3)


@pytest.mark.parametrize(
    "out",
    [
        LOSS,
        (LOSS, LOGITS),
        [LOSS],
        {"logits": LOGITS, "loss": LOSS},
        SimpleNamespace(loss=LOSS, logits=LOGITS),
    ],
)
def test_found(out: object) -> None:
    assert find_loss(out) is LOSS


@pytest.mark.parametrize(
    "out",
    [LOGITS, (LOGITS, LOSS), {"logits": LOGITS}, (), None, torch.tensor(1), {"loss": LOGITS}],
)
def test_not_found(out: object) -> None:
    assert find_loss(out) is None
