"""Calls on sequences of several lengths, of which torch does not know the shapes on fake tensors.

Packed sequences and `ctc_loss`. They are recorded whole, and run as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import _constrain_range_for_size

from merakc.kernels.ragged import RECURRENT

Emit = Callable[[str, tuple[Any, ...], tuple[Tensor, ...]], None]
"""`emit(op, args, outs)` adds a node whose results are these."""
First = Callable[[Tensor], int]
"""`first(sizes)` reads the first number of a tensor."""
CTC = ("aten.ctc_loss.Tensor", "aten.ctc_loss.IntList")


def _size(like: Tensor) -> Any:
    """A size that depends on values."""
    assert isinstance(like, FakeTensor)
    assert like.fake_mode.shape_env is not None
    size = like.fake_mode.shape_env.create_unbacked_symint()
    _constrain_range_for_size(size)
    return size


def _pack(emit: Emit, _: First, x: Tensor, lengths: Tensor, batch_first: bool) -> Any:
    data = x.new_empty((_size(lengths), *x.shape[2:]))
    sizes = lengths.new_empty((_size(lengths),), dtype=torch.int64)
    emit("ragged.pack", (x, lengths, batch_first), (data,))
    emit("ragged.batch_sizes", (lengths,), (sizes,))
    return data, sizes


def _unpack(
    emit: Emit,
    first: First,
    data: Tensor,
    sizes: Tensor,
    batch_first: bool,
    padding: Any,
    total: int,
) -> Any:
    batch = first(sizes)
    steps = total if total > 0 else sizes.shape[0]
    shape = (batch, steps) if batch_first else (steps, batch)
    out = data.new_empty((*shape, *data.shape[1:])), sizes.new_empty((batch,))
    emit("ragged.unpack", (data, sizes, batch_first, padding, total), out)
    return out


def _recurrent(name: str) -> Callable[..., Any]:
    def run(
        emit: Emit, _: First, data: Tensor, sizes: Tensor, states: Any, params: Any, *options: Any
    ) -> Any:
        every = [states] if isinstance(states, Tensor) else list(states)
        width = every[0].shape[-1] * (2 if options[-1] else 1)
        outs = data.new_empty((data.shape[0], width)), *(s.new_empty(s.shape) for s in every)
        emit(f"ragged.{name}", (data, sizes, states, params, *options), outs)
        return outs

    return run


def _ctc(name: str) -> Callable[..., Any]:
    def run(emit: Emit, _: First, log_probs: Tensor, targets: Tensor, *more: Any) -> Any:
        reduction = more[3] if len(more) > 3 else 1
        out = log_probs.new_empty(() if reduction else log_probs.shape[1:-1])
        emit(name, (log_probs, targets, *more), (out,))
        return out

    return run


RECURRENTS = tuple(f"aten.{name}.data" for name in RECURRENT)
RULES: Mapping[str, Callable[..., Any]] = {
    "aten._pack_padded_sequence.default": _pack,
    "aten._pad_packed_sequence.default": _unpack,
    **{f"aten.{name}.data": _recurrent(name) for name in RECURRENT},
    **{name: _ctc(name) for name in CTC},
}
