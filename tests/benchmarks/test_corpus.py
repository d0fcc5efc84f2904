"""The corpus is text, and samples are stretches of it."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from benchmarks.corpus import library_bytes, sample


def test_the_text_is_the_standard_library() -> None:
    text = library_bytes(max_bytes=50_000)
    assert text.shape == (50_000,)
    first = min(Path(os.__file__).parent.glob("*.py")).read_bytes()[:200]
    assert bytes(text[: len(first)].tolist()) == first


def test_samples_are_stretches_that_depend_on_the_seed() -> None:
    text = torch.arange(200, dtype=torch.uint8)
    batch = sample(text, 5, 8, seed=1)
    assert batch["input_ids"].shape == (5, 8)
    assert torch.equal(batch["input_ids"].diff(), torch.ones(5, 7, dtype=torch.long))
    assert torch.equal(batch["labels"], batch["input_ids"])
    assert torch.equal(batch["labels"], sample(text, 5, 8, seed=1)["labels"])
    assert not torch.equal(batch["labels"], sample(text, 5, 8, seed=2)["labels"])
