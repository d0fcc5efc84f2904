"""What a call does is seen before it is done."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from merakc.train.outside.watching import OnACopy, Watched, WritesError, memory


@pytest.mark.parametrize(
    "write",
    [
        lambda x, y: x.mul_(2),
        lambda x, y: x[0].zero_(),
        lambda x, y: x.__setitem__(0, 1.0),
        lambda x, y: x.view(-1).copy_(y.view(-1)),
        lambda x, y: torch.add(y, 1, out=x),
        lambda x, y: torch._foreach_add_([x], 1),
    ],
)
def test_a_write_is_refused_before_it_happens(
    write: Callable[[torch.Tensor, torch.Tensor], object],
) -> None:
    with FakeTensorMode():
        x, y = torch.empty(2, 3), torch.empty(2, 3)
        before = x._version
        with pytest.raises(WritesError) as found, Watched([x]):
            write(x, y)
        assert found.value.target is x
        assert x._version == before
        with Watched([x]) as watched:
            write(y, x)
            torch.rand(3)
        assert watched.drawn


def test_a_copy_is_written_in_place_of_the_tensor() -> None:
    x = torch.ones(3)
    made = OnACopy(torch.Tensor.mul_)(x, 2)
    assert (x.tolist(), made.tolist()) == ([1, 1, 1], [2, 2, 2])
    assert memory(made) != memory(x) == memory(x[1:])
