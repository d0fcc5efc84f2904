"""Documents that are packed into one row: each attends to itself alone, and its positions start
at 0, by a mask of blocks and position ids in the batch.
"""

from __future__ import annotations

import dataclasses

import torch

from benchmarks.models import (
    EVEN_VOCABULARY,
    IGNORED,
    MODELS,
    SEQUENCE,
    Batch,
    words,
)


def packed_batch(batch_size: int, generator: torch.Generator) -> Batch:
    """Rows of up to five documents of different lengths, of which no word follows the last one of
    the document before.
    """
    starts = torch.rand((batch_size, SEQUENCE), generator=generator) < 1 / 3
    starts[:, 0] = True
    document, place = starts.cumsum(1), torch.arange(SEQUENCE).expand(batch_size, -1)
    first = torch.where(starts, place, 0).cummax(1).values
    ids = words((batch_size, SEQUENCE), generator, EVEN_VOCABULARY)
    is_same = document[:, :, None] == document[:, None, :]
    return {
        "input_ids": ids,
        "attention_mask": (is_same & torch.ones_like(is_same).tril())[:, None],
        "position_ids": place - first,
        "labels": ids.masked_fill(starts, IGNORED),
    }


PACKED = {
    "llama_packed": dataclasses.replace(
        MODELS["llama"], name="llama_packed", make_batch=packed_batch
    )
}
