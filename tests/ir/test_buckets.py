"""Which parameters are gathered and reduced together."""

from __future__ import annotations

import torch
from torch import nn

from merakc.frontend.record import record
from merakc.ir.buckets import bucket_names, parameters_in_order


class Backwards(nn.Module):
    """Uses its last parameters first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3)
        self.unused = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A sum."""
        return self.first(self.second(x)).sum()


def test_parameters_come_in_the_order_of_their_use() -> None:
    graph = record(Backwards(), (torch.ones(2, 3),), {}).graph
    found = [i.target for i in parameters_in_order(graph)]
    assert found == ["second.weight", "second.bias", "first.weight"]


def test_buckets_are_of_one_dtype_and_of_about_a_size() -> None:
    single, half = torch.float32, torch.float16
    items = [("a", single, 6), ("b", single, 5), ("c", half, 1), ("d", half, 20), ("e", half, 1)]
    assert list(bucket_names(items, 11)) == [("a", "b"), ("c",), ("d",), ("e",)]
    assert list(bucket_names(items, 10)) == [("a",), ("b",), ("c",), ("d",), ("e",)]
    assert list(bucket_names([], 10)) == []
