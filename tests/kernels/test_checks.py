"""Checks of values: they pass them on, or name the line."""

from __future__ import annotations

import pytest
import torch

from merakc.errors import RecordError
from merakc.kernels.checks import counted, local, unchecked, within

PLACES = torch.tensor([2, 0, 3, 3, 8, 7])  # two rows of each of three samples, of three places


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


def test_a_part_has_the_places_of_its_samples() -> None:
    found = within(PLACES, 3, 2, "here")
    assert found.tolist() == [2, 0, 0, 0, 2, 1]
    assert torch.equal(local(found, 3, 2, "here"), PLACES)
    assert local(found[4:], 3, 2, "here").tolist() == [2, 1]


@pytest.mark.parametrize("places", [[3, 0, 3, 3, 8, 7], [2, 0, 2, 3, 8, 7], [-1, 0, 3, 3, 8, 7]])
def test_places_of_another_sample_are_refused(places: list[int]) -> None:
    with pytest.raises(RecordError, match=r"here: places .* from one sample to another"):
        within(torch.tensor(places), 3, 2, "here")
