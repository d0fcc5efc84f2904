from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from merakc.batches.objects import check_objects
from merakc.errors import ConfigError


class Slotted:
    __slots__ = ("tensor",)

    def __init__(self) -> None:
        self.tensor = torch.zeros(2)


class Circle:
    def __init__(self) -> None:
        self.own = self


@dataclass
class Frozen:
    """A dataclass whose class nobody has opened."""

    y: Any


@pytest.mark.parametrize(
    ("hidden", "place"),
    [
        (SimpleNamespace(boxes=torch.zeros(2)), r"\.boxes"),
        (SimpleNamespace(more=[{"a": torch.zeros(2)}]), r"\.more\[0\]\['a'\]"),
        (UserDict(a=torch.zeros(2)), r"\['a'\]"),
        (Slotted(), r"\.tensor"),
        ({torch.zeros(2)}, r"\[0\]"),
        (Frozen(torch.zeros(2)), r"\.y"),
        (SimpleNamespace(a=np.zeros(2)), r"\.a"),
    ],
    ids=lambda x: type(x).__name__,
)
def test_tensors_that_nobody_sees(hidden: Any, place: str) -> None:
    name = type(hidden).__name__
    with pytest.raises(ConfigError, match=rf"\['targets'\]\[1\] is of type {name}, .*{place}"):
        check_objects(((torch.zeros(2),), {"targets": [1, hidden]}))


def test_arrays() -> None:
    with pytest.raises(ConfigError, match=r"is a numpy array; give a tensor"):
        check_objects((np.zeros(2),))


def test_what_hides_nothing_passes() -> None:
    plain = [1, None, "x", torch.float32, np.float64(2.0), SimpleNamespace(a=[1, "b"]), Circle()]
    check_objects((plain, {"x": torch.zeros(2)}, len))
