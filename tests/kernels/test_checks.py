"""Checks of values: they pass them on, or name the line."""

from __future__ import annotations

import pytest
import torch

from merakc.errors import RecordError
from merakc.kernels.checks import counted, unchecked


def test_a_mask_with_its_places_passes() -> None:
    mask = torch.tensor([True, False, True])
    assert torch.equal(counted(mask, 2, "model.py:1"), mask)


@pytest.mark.parametrize("count", [1, 3])
def test_any_other_number_is_refused(count: int) -> None:
    with pytest.raises(RecordError, match=rf"model.py:1: .* 2 places, and values for {count}"):
        counted(torch.tensor([True, False, True]), count, "model.py:1")


def test_values_of_no_meaning_pass() -> None:
    mask = torch.tensor([True, False])
    with unchecked():
        assert torch.equal(counted(mask, 2, "model.py:1"), mask)
    with pytest.raises(RecordError):
        counted(mask, 2, "model.py:1")
