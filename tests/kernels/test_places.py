"""Places of the whole batch as those within samples, and back."""

from __future__ import annotations

import pytest
import torch

from merakc.errors import RecordError
from merakc.kernels import ops  # noqa: F401  registers them

within, local = torch.ops.merakc.within, torch.ops.merakc.local
PLACES = torch.tensor([2, 0, 3, 3, 8, 7])  # two rows of each of three samples, of three places


def test_a_part_has_the_places_of_its_samples() -> None:
    found = within(PLACES, 3, 2, "here")
    assert found.tolist() == [2, 0, 0, 0, 2, 1]
    assert torch.equal(local(found, 3, 2, "here"), PLACES)
    assert local(found[4:], 3, 2, "here").tolist() == [2, 1]


@pytest.mark.parametrize("places", [[3, 0, 3, 3, 8, 7], [2, 0, 2, 3, 8, 7], [-1, 0, 3, 3, 8, 7]])
def test_places_of_another_sample_are_refused(places: list[int]) -> None:
    with pytest.raises(RecordError, match=r"here: places .* from one sample to another"):
        within(torch.tensor(places), 3, 2, "here")
