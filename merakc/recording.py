"""A micro-batch of a batch, recorded, with all that only the whole batch can say of it."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from merakc.batches import (
    batch_size_of,
    cast_floats,
    doubled,
    named_tensors,
    sampled_names,
    split_batch,
)
from merakc.errors import ConfigError, RecordError
from merakc.frontend.record import Recording, record
from merakc.ir.graph import Graph, OutputKind
from merakc.ir.precision import Precision
from merakc.passes.batch_numbers import has_numbers, settle_numbers
from merakc.passes.constant_masks import with_known_masks
from merakc.passes.key_draws import has_draws, key_draws


def record_part(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    micro_batches: int,
    device: torch.device,
    precision: Precision | None = None,
) -> Recording:
    """Records the first of a batch's micro-batches, under the autocast that is on for `device`.

    Its random draws are keyed by the samples of the batch. Where the loss is scaled by numbers, a
    recording of twice the samples says which of them are the size of the batch. With a `precision`
    the parameters and the batch's floating tensors are of the dtype that it computes in. Raises
    `RecordError` as `record` and `settle_numbers` do.
    """
    dtype = precision.dtype("compute") if precision else None
    args, kwargs = cast_floats(args, kwargs, dtype)
    part, *others = split_batch(args, kwargs, micro_batches)
    sampled = sampled_names(args, kwargs)
    samples = batch_size_of(args, kwargs) // micro_batches
    with torch.autocast("cpu", *autocast_of(device)):  # fake tensors are of the CPU
        recording = record(model, *part, dtype)
        _check_parts(recording, others)
        graph = with_known_masks(recording.graph)
        # A model that takes no two samples draws for each alone, whatever it draws.
        apart = has_draws(graph) and samples == 1
        wide: Graph | None = None
        if apart or has_numbers(graph):
            with contextlib.suppress(Exception):
                wide = record(model, *doubled(*part, sampled), dtype).graph
    if wide is not None and has_numbers(graph):
        graph = settle_numbers(graph, wide, samples)
    return replace(recording, graph=key_draws(graph, sampled, wide if apart else None))


def _check_parts(recording: Recording, others: Sequence[Any]) -> None:
    """Raises `RecordError` where Python reads something else of another micro-batch."""
    for number, (args, kwargs) in enumerate(others, 1) if recording.reads else ():
        difference = recording.reads.difference(named_tensors(args, kwargs))  # type: ignore[union-attr]
        if difference:
            raise RecordError(
                f"the forward reads other numbers of micro-batch {number} than of the first: "
                f"{difference}; one graph runs all micro-batches: pad them alike, keep the number "
                "in a tensor, or run the batch whole (micro_batches=1)"
            )


def with_loss(recording: Recording) -> Recording:
    """The recording. Raises `ConfigError` where its forward returns no loss."""
    if not any(o.kind is OutputKind.LOSS for o in recording.graph.outputs):
        raise ConfigError(
            f"the forward of {recording.model_name} returns no loss for this batch; give it the "
            "labels, or wrap the model in a module whose forward returns the loss"
        )
    return recording


def autocast_of(device: torch.device) -> tuple[torch.dtype, bool]:
    """The dtype of autocast on a device, and whether it is on."""
    kind = device.type
    return torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
