"""A part of a batch, recorded, and what the whole batch says of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import nn

from merakc.batches import (
    cast_floats,
    named_tensors,
    resized,
    sample_rows,
    split_batch,
    taken_dims,
)
from merakc.errors import ConfigError, ForwardError, RecordError, failure
from merakc.frontend.record import Recording, record
from merakc.ir.batches import BY_SIZE, WHOLE_BATCH, BatchDims, BatchLayout, Couplings, Rows
from merakc.ir.graph import Graph, OutputKind
from merakc.ir.precision import Precision
from merakc.kernels.draws import KEY_POSITION
from merakc.passes.batches.alike import OtherPathError, of_one_sample
from merakc.passes.batches.analyse import Analysis, analyse, retaken
from merakc.passes.batches.certificate import certify
from merakc.passes.batches.part import keyed
from merakc.passes.batches.recorded import BatchRecording
from merakc.passes.constant_masks import with_known_masks


def record_part(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    layout: BatchLayout,
    device: torch.device,
    precision: Precision | None = None,
    *,
    couplings: Couplings = WHOLE_BATCH,
    dims: BatchDims = BY_SIZE,
    divided: bool = False,
) -> BatchRecording:
    """Records the first part of this dp rank's batch, under the autocast that is on for `device`.

    Where there are several parts, the whole batch is recorded beside it: the two say what the parts
    make of every value. `couplings` says which samples are coupled, where any are; `dims` where
    they stand in the batch; `divided` that one part alone may be divided further. Random draws are
    keyed by the samples. With a `precision` the parameters and the batch's floating tensors are of
    the dtype that it computes in. Raises `RecordError` as `record` and `analyse` do.
    """
    dtype = precision.dtype("compute") if precision else None
    args, kwargs = cast_floats(args, kwargs, dtype)
    sampled = sample_rows(args, kwargs, dims)
    tensors = {n: t for n, t in named_tensors(args, kwargs).items() if t.dim()}
    taken = taken_dims({n: sampled.get(n) for n in tensors})

    def recorded(samples: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Recording:
        with torch.autocast("cpu", *autocast_of(device)):  # fake tensors are of the CPU
            try:
                made = record(model, args, kwargs, dtype)
            except ForwardError as error:
                if samples == layout.own:
                    raise
                cause = error.__cause__ or error
                raise _other_size(samples, layout.own, taken, cause) from error
        return replace(made, graph=with_known_masks(made.graph))

    @cache
    def sized(samples: int) -> Recording:
        if samples == layout.each:
            return recorded(samples, *split_batch(args, kwargs, layout.micro_batches, dims)[0])
        return recorded(samples, *resized(args, kwargs, sampled, samples))

    part = sized(layout.each)
    if layout.each == 1 and layout.parts > 1:
        two, wide = sized(2).graph, _wide(layout.total)
        with _telling(taken):
            graph = of_one_sample(part.graph, two, sized(wide).graph, wide)
        part = part if graph is part.graph else replace(sized(2), graph=graph)

    def graphs(samples: int) -> Graph:
        return part.graph if samples == layout.each else sized(samples).graph

    found: Analysis | None = None
    unchecked = ""
    if layout.parts > 1:
        with _telling(taken):
            found = analysed(graphs, sampled, layout.each, layout.total)
        loss = next((o for o in part.graph.outputs if o.kind is OutputKind.LOSS), None)
        if loss is not None and couplings == WHOLE_BATCH:
            unchecked = certify(found, loss)
    elif divided or any(n.op in KEY_POSITION for n in part.graph.nodes):
        with contextlib.suppress(Exception):  # a model of one size of batch alone is not divided
            found = analysed(graphs, sampled, layout.each, 2 * layout.each)
            found = retaken(found, part.graph, part.graph, layout.each, layout.each)
    graph = part.graph
    if found is not None:
        nodes = tuple(keyed(found, n, layout.each) for n in graph.nodes)
        graph = replace(graph, nodes=nodes)
    return BatchRecording(
        graph, part.outputs, part.structure, part.aliases, part.model_name,
        layout=layout, found=found, couplings=couplings, dims=dims, unchecked=unchecked,
    )  # fmt: skip


def analysed(
    sized: Callable[[int], Graph], sampled: Mapping[str, Rows], samples: int, total: int
) -> Analysis:
    """What parts of so many samples make of the values of a forward; `sized` records it.

    Of one sample, no dim can be told from another of size 1: what holds for parts of two holds for
    it.
    """
    if samples > 1:
        return analyse(sized(samples), sized(total), sampled, samples, total)
    wide = _wide(total)
    found = analyse(sized(2), sized(wide), sampled, 2, wide)
    return retaken(found, sized(samples), sized(total), samples, total)


@contextlib.contextmanager
def _telling(taken: str) -> Iterator[None]:
    """Adds to errors of other paths where samples were taken to stand."""
    try:
        yield
    except OtherPathError as error:
        raise RecordError(f"{error}; {taken}") from error


def _wide(total: int) -> int:
    """A number of samples to compare two of them with, for a batch of `total`."""
    return total if total > 2 else 2 * total


def _other_size(samples: int, own: int, taken: str, error: BaseException) -> RecordError:
    """That a forward only takes the batch that was given."""
    return RecordError(
        f"the forward takes the batch of {own} samples, and fails for {samples} of them "
        f"({failure(error)}); {taken}; if the model is for one size of batch, train with dp=1 and "
        "micro_batches=1"
    )


def with_loss(recording: BatchRecording) -> BatchRecording:
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
