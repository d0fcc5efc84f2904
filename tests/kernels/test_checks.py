"""Checks: what holds passes as it is, what does not names the line and both numbers."""

from __future__ import annotations

import pytest
import torch

from merakc.errors import RecordError
from merakc.kernels.ops import resolve_op

COUNTED = resolve_op("merakc.counted.default")


def test_a_mask_of_the_right_count_passes() -> None:
    mask = torch.tensor([True, False, True])
    assert torch.equal(COUNTED(mask, 2, "model.py:3"), mask)


@pytest.mark.parametrize("count", [1, 3])
def test_another_count_is_refused_with_its_line(count: int) -> None:
    mask = torch.tensor([True, False, True])
    with pytest.raises(RecordError, match=rf"model.py:3: .* has 2 places, and values for {count}"):
        COUNTED(mask, count, "model.py:3")
