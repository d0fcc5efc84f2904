"""Bytes of tensors, however they lie in memory."""

from __future__ import annotations

import pytest
import torch

from merakc.files.elements import bytes_of

WHOLE = torch.arange(12.0).view(3, 4)


@pytest.mark.parametrize(
    "tensor",
    [WHOLE, WHOLE.t(), WHOLE[1:, 1], WHOLE[1:2, 1], WHOLE[1, 1], WHOLE[:0]],
    ids=["whole", "turned", "column", "one of a column", "scalar", "none"],
)
def test_bytes_are_those_of_the_elements_in_their_order(tensor: torch.Tensor) -> None:
    wanted = b"".join(torch.tensor(x).numpy().tobytes() for x in tensor.flatten().tolist())
    assert bytes_of(tensor).numpy().tobytes() == wanted
    assert bytes_of(tensor.bfloat16()).shape == (2 * tensor.numel(),)


def test_nothing_is_copied_that_lies_close_together() -> None:
    rows = torch.arange(12.0).view(3, 4)[1:]
    assert bytes_of(rows).data_ptr() == rows.data_ptr()
