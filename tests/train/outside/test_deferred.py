"""Tensors that are not there yet."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch

from merakc.errors import ConfigError
from merakc.train.outside.deferred import Deferred, deferred, deferred_in, unreachable

CPU = torch.device("cpu")


class Two:
    """Every value of it is 2."""

    def apply(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        given = [self.value(x.place) if isinstance(x, Deferred) else x for x in args]
        return func(*given, **kwargs)

    def value(self, place: int) -> torch.Tensor:
        return torch.full((2, 3), 2.0)

    def join(self, other: Any) -> bool:
        return False


def made(*, trained: bool = True) -> Deferred:
    like = torch.empty(2, 3, device="meta", requires_grad=trained)
    return deferred(Two(), 0, like, CPU, "why not")


def test_what_is_known_is_told_and_what_is_not_is_asked_for() -> None:
    x = made()
    assert isinstance(x, torch.Tensor)
    assert (x.shape, x.dtype, x.device, x.dim(), len(x)) == ((2, 3), torch.float32, CPU, 2, 2)
    assert x.requires_grad
    assert not made(trained=False).requires_grad
    assert (x + 1).sum().item() == 18.0
    assert (x + made()).sum().item() == 24.0  # of two calls of a model
    assert [y is x for y in deferred_in([x, {"y": 1}])] == [True]


def test_nothing_passes_it_by() -> None:
    x = made()
    with pytest.raises(ConfigError, match="past __torch_function__"), (
        torch._C.DisableTorchFunctionSubclass()
    ):  # fmt: skip
        torch.add(x, 1)
    with pytest.raises(ConfigError, match="why not"):
        unreachable(lambda: torch.ones(2), "why not").sum().backward()
