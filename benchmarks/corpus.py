"""A text that every machine with Python has: the source of its own standard library, as bytes."""

from __future__ import annotations

import os
from pathlib import Path

import torch

VOCABULARY = 256
MAX_BYTES = 4_000_000


def library_bytes(max_bytes: int = MAX_BYTES) -> torch.Tensor:
    """The top-level modules of the standard library, one after the other: uint8 `[bytes]`."""
    text = bytearray()
    for path in sorted(Path(os.__file__).parent.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= max_bytes:
            break
    return torch.frombuffer(text[:max_bytes], dtype=torch.uint8)


def sample(text: torch.Tensor, batch_size: int, length: int, seed: int) -> dict[str, torch.Tensor]:
    """Random stretches of the text as `input_ids` and `labels`, int64 `[batch_size, length]`."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, len(text) - length, (batch_size, 1), generator=generator)
    ids = text[starts + torch.arange(length)].long()
    return {"input_ids": ids, "labels": ids.clone()}
