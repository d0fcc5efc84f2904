"""Batch norms of the plain model that normalise each part of a batch by itself, by convention."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from merakc.ir.batches import Rows

Forward = Callable[[torch.Tensor], torch.Tensor]


@contextmanager
def norms_by_parts(
    model: nn.Module, norms: Mapping[str, Rows], parts: int, writing_parts: int
) -> Iterator[None]:
    """While entered, `norms` of a model that is called with whole batches normalise by parts.

    They are batch norms, by name, with where the samples stand in what they are given. Their
    running statistics are written when the model returns, by the first `writing_parts` parts, one
    after the other, as micro-batches write them.
    """
    written = _Statistics(writing_parts)
    with ExitStack() as stack:
        for name, rows in norms.items():
            norm = model.get_submodule(name)
            assert isinstance(norm, _BatchNorm), name
            forward = written.by_parts(norm, rows, parts)
            stack.enter_context(patch.object(norm, "forward", forward))
        stack.callback(model.register_forward_hook(written.write).remove)
        yield


class _Statistics:
    """What the norms were given since the model was called, to be written in the parts' order."""

    def __init__(self, writing_parts: int) -> None:
        self.writing_parts = writing_parts
        self.calls: list[tuple[Forward, list[torch.Tensor]]] = []

    def by_parts(self, norm: _BatchNorm, rows: Rows, parts: int) -> Forward:
        own: Forward = norm.forward

        def forward(x: torch.Tensor) -> torch.Tensor:
            each, rest = divmod(rows.samples(x.shape), parts)
            assert not rest, f"{tuple(x.shape)} in {parts} parts"
            given = [rows.take(x, k * each, each) for k in range(parts)]
            self.calls.append((own, [part.detach() for part in given]))
            kept, norm._buffers = (
                norm._buffers,
                {name: None if b is None else b.clone() for name, b in norm._buffers.items()},
            )
            try:
                return rows.join([own(part) for part in given])
            finally:
                norm._buffers = kept

        return forward

    def write(self, *_: object) -> None:
        calls, self.calls = self.calls, []
        with torch.no_grad():
            for k in range(self.writing_parts):
                for own, given in calls:
                    own(given[k])
