"""A document of a packed row computes what it does alone."""

from __future__ import annotations

from itertools import pairwise

import torch

from benchmarks.models import IGNORED
from benchmarks.packed import PACKED


def test_documents_do_not_see_each_other() -> None:
    case = PACKED["llama_packed"]
    model, batch = case.model(torch.float64), case.batch(3)
    scores = model(**batch).logits
    labels, lengths = batch["labels"], set[int]()
    for row, starts in enumerate(labels == IGNORED):
        ends = [*starts.nonzero().flatten().tolist(), len(starts)]
        assert len(ends) > 2
        for start, end in pairwise(ends):
            alone = model(input_ids=batch["input_ids"][row : row + 1, start:end]).logits
            torch.testing.assert_close(scores[row : row + 1, start:end], alone)
            lengths.add(end - start)
    assert len(lengths) > 2
