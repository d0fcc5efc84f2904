"""Sequences of several lengths in one tensor, as torch packs them.

Lengths and the sizes of steps are read on the CPU, wherever the values are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def pack(x: Tensor, lengths: Tensor, batch_first: bool) -> Tensor:
    """The first `lengths` steps of each sequence of `x`, [batch, steps, *] or [steps, batch, *],
    step by step: [sum of lengths, *]. Lengths fall.
    """
    data: Tensor = torch._VF._pack_padded_sequence(x, lengths.cpu(), batch_first)[0]
    return data


def batch_sizes(lengths: Tensor) -> Tensor:
    """How many of the sequences have each step, [steps] on the CPU."""
    steps = torch.arange(int(lengths.max()))
    return (steps[:, None] < lengths.cpu()).sum(1)


def unpack(
    data: Tensor, sizes: Tensor, batch_first: bool, padding: float, total_length: int
) -> tuple[Tensor, Tensor]:
    """The sequences of packed `data`, padded to `total_length` or the longest; their lengths."""
    found: tuple[Tensor, Tensor] = torch._VF._pad_packed_sequence(
        data, sizes.cpu(), batch_first, padding, total_length
    )
    return found


def _recurrent(name: str) -> Callable[..., tuple[Tensor, ...]]:
    op = getattr(torch.ops.aten, name).data

    def run(
        data: Tensor, sizes: Tensor, states: Any, params: Sequence[Tensor], *options: Any
    ) -> Any:
        return op(data, sizes.cpu(), states, params, *options)

    return run


RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")
CALLS: Mapping[str, Callable[..., Any]] = {
    "ragged.pack": pack,
    "ragged.batch_sizes": batch_sizes,
    "ragged.unpack": unpack,
    **{f"ragged.{name}": _recurrent(name) for name in RECURRENT},
}
