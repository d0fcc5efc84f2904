"""What `as_strided` shows, by dims."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from merakc.frontend.calls.strides import by_dims


def base() -> Tensor:
    return torch.arange(3 * 8 * 4, dtype=torch.float64).reshape(3, 8, 4).requires_grad_()


# name -> what is strided, size, stride, offset
CASES = {
    "windows": (lambda x: x, (3, 3, 4, 4), (32, 8, 4, 1), None),
    "windows of chunks, as of Longformer": (
        lambda x: x.view(3, 2, 4, 4), (3, 3, 4, 4), (32, 8, 4, 1), None,
    ),
    "a dim of steps": (lambda x: x, (3, 4, 2), (32, 8, 2), 1),
    "other order": (lambda x: x.transpose(0, 2), (8, 3, 4), (4, 32, 1), None),
    "copies": (lambda x: x, (3, 5, 4), (32, 0, 1), None),
    "a row of ones": (lambda x: x[:, :1], (3, 1, 4), (32, 7, 1), None),
    "all in one": (lambda x: x, (96,), (1,), None),
    "a part of a view": (lambda x: x[1:, ::2], (2, 3, 2, 4), (32, 8, 8, 1), 32),
    "one": (lambda x: x, (), (), 5),
    "across samples": (lambda x: x, (5, 32), (16, 1), None),
    "the tensor itself": (lambda x: x, (3, 8, 4), (32, 4, 1), None),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_shows_the_same_elements_and_hands_back_the_same_gradients(case: str) -> None:
    make, size, stride, offset = CASES[case]
    x, y = base(), base()
    wanted = make(x).as_strided(size, stride, offset)
    strided = make(y)
    found = by_dims(strided, size, stride, offset)
    assert found is not None
    assert found is not strided  # torch takes no tensor for a view of itself
    weights = torch.rand(wanted.shape, dtype=torch.float64)
    (wanted * weights).sum().backward()
    (found * weights).sum().backward()
    assert torch.equal(found, wanted)
    torch.testing.assert_close(y.grad, x.grad)


@pytest.mark.parametrize(
    ("make", "size", "stride", "offset"),
    [
        (lambda x: x[:, :4], (3, 5, 4), (32, 4, 1), None),  # rows that the slice has left out
        (lambda x: x, (3, 9, 4), (32, 4, 1), None),  # of the next sample, and beyond the last
        (lambda x: x[1:], (2, 4), (32, 1), 0),  # before the first
        (lambda x: x[0, 0, :1].expand(4), (4,), (1,), None),  # all in one place
    ],
)
def test_other_elements_than_those_of_the_tensor_are_no_matter_of_dims(
    make: Callable[[Tensor], Tensor],
    size: Sequence[int],
    stride: Sequence[int],
    offset: int | None,
) -> None:
    assert by_dims(make(base()), size, stride, offset) is None


@settings(max_examples=300, deadline=None)
@given(
    st.permutations([0, 1, 2]),
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 12)), max_size=4),
    st.integers(0, 40),
)
def test_whatever_is_shown_is_what_torch_shows(
    order: Sequence[int], dims: Sequence[tuple[int, int]], offset: int
) -> None:
    size, stride = [n for n, _ in dims], [t for _, t in dims]
    x = base().detach().permute(*order)
    if offset + sum((n - 1) * t for n, t in dims) >= x.numel():
        return
    found = by_dims(x, size, stride, offset)
    if found is not None:
        assert torch.equal(found, x.as_strided(size, stride, offset))
