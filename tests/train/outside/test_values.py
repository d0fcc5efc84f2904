"""What outputs are worth: those that a step has kept, another forward's, and what is gone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from merakc.errors import ConfigError
from merakc.train.outside.noted import Noted, Slot, forward, key_of
from merakc.train.outside.values import mark_of
from tests.train.outside.small import X, Y, normed

pytestmark = pytest.mark.filterwarnings("ignore:.* returns no loss", "ignore:a loss is made of")


def test_values_are_there_before_a_step_and_behind_it_while_nothing_has_changed() -> None:
    model = normed()
    logits = model(X)
    early = logits.argmax(-1).tolist()
    F.cross_entropy(logits, Y).backward()
    assert logits.argmax(-1).tolist() == early
    likely = logits.softmax(-1)
    with torch.no_grad():
        model.get_parameter("last.bias").add_(1.0)
    assert likely.argmax(-1).tolist() == early  # they were computed with the step's weights
    with pytest.raises(ConfigError, match="were changed between"):
        likely.square().sum().backward()


def test_a_mark_is_that_of_the_same_calls() -> None:
    key = key_of(forward, (Slot(0),), {}, True, ())
    one, two = (
        Noted(forward, (Slot(0),), {}, first, key, True, (torch.float32, False), "here")
        for first in (1, 2)
    )
    assert mark_of([one], 1) == mark_of([one], 1)
    assert len({mark_of([one], 1), mark_of([two], 1), mark_of([one], 2)}) == 3


def test_a_value_that_was_written_into_is_not_that_of_the_step() -> None:
    model = normed()
    logits = model(X)
    F.cross_entropy(logits, Y).backward()
    logits.detach().zero_()
    loss = logits.softmax(-1).square().mean()
    with pytest.raises(ConfigError, match="was written into since it was read"):
        loss.backward()
