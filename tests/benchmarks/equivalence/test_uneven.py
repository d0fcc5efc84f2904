"""The uneven model: sizes that nothing divides."""

from __future__ import annotations

import torch

from benchmarks.equivalence.uneven import UNEVEN


def test_sizes_are_primes_or_smaller_than_the_ranks() -> None:
    model = UNEVEN.model(torch.float64)
    sizes = {size for p in model.parameters() for size in p.shape}
    assert sizes == {1, 3, 5, 7, 13}
    assert {p.numel() for p in model.parameters() if p.numel() < 4} == {1, 3}
    assert sum(p.dim() == 0 for p in model.parameters()) == 5


def test_every_parameter_gets_a_gradient() -> None:
    model, batch = UNEVEN.model(torch.float64), UNEVEN.batch(4, torch.float64)
    model(**batch)["loss"].backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters())
    assert UNEVEN.valid_labels(batch) == 4
