"""Bags of embeddings (`nn.EmbeddingBag`) of as many words each, while recording.

torch flattens them, and tells its op where each bag begins, so that nothing of it can be split.
What is recorded are the rows of all words, summed, averaged or compared along their dim. Bags that
lie one behind the other, each of its own size, stay torch's op.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from merakc.frontend.replaced import replaced

_SIGNATURE = inspect.signature(F.embedding_bag)


@contextlib.contextmanager
def bags_in_rows() -> Iterator[None]:
    """Has `F.embedding_bag` make plain calls where all bags are of one size."""
    with replaced(F, "embedding_bag", _in_rows(F.embedding_bag)):
        yield


def _in_rows(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def embedding_bag(*args: Any, **kwargs: Any) -> Tensor:
        bound = _SIGNATURE.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        words, table, weights = given["input"], given["weight"], given["per_sample_weights"]
        others = ("offsets", "max_norm", "scale_grad_by_freq", "sparse", "include_last_offset")
        plain = words.dim() == table.dim() == 2 and words.shape[1] > 0 and table.is_floating_point()
        of_sum = weights is None or (given["mode"] == "sum" and weights.shape == words.shape)
        padding = given["padding_idx"]
        fits = padding is None or -len(table) <= padding < len(table)
        if not (plain and of_sum and fits and given["mode"] in _MODES) or any(
            given[name] not in (None, False) for name in others
        ):
            return original(*args, **kwargs)
        rows = F.embedding(words, table)
        rows = rows if weights is None else rows * weights.unsqueeze(-1)
        return _MODES[given["mode"]](
            rows, None if padding is None else words != padding % len(table)
        )

    return embedding_bag


def _sum(rows: Tensor, kept: Tensor | None) -> Tensor:
    return (rows if kept is None else rows.masked_fill(~kept.unsqueeze(-1), 0.0)).sum(1)


def _mean(rows: Tensor, kept: Tensor | None) -> Tensor:
    return rows.mean(1) if kept is None else _sum(rows, kept) / kept.sum(1, True).clamp(min=1)


def _max(rows: Tensor, kept: Tensor | None) -> Tensor:
    if kept is None:
        return rows.max(1).values
    largest = rows.masked_fill(~kept.unsqueeze(-1), -torch.inf).max(1).values
    return largest.masked_fill(~kept.any(1, True), 0.0)


_MODES: dict[str, Callable[..., Tensor]] = {"sum": _sum, "mean": _mean, "max": _max}
