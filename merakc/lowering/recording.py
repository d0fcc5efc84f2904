"""A part of a batch, recorded, and what the whole batch says of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from merakc.batches.split import (
    cast_floats,
    named_tensors,
    split_batch,
)
from merakc.errors import ConfigError, ForwardError, RecordError
from merakc.frontend.python.compared import Compared
from merakc.frontend.record import Recording
from merakc.ir.batches import BY_SIZE, WHOLE_BATCH, BatchDims, BatchLayout, Couplings, Rows
from merakc.ir.graph import Graph, OutputKind
from merakc.ir.precision import Precision
from merakc.kernels.draws import KEY_POSITION
from merakc.kernels.float8.scaled import check_device
from merakc.lowering.find_samples import Fit, fit_of
from merakc.lowering.forwards import Forward, Shared, telling, two_sizes
from merakc.passes.batches.alike import check_read_alike
from merakc.passes.batches.analyse import Analysis, analyse, retaken
from merakc.passes.batches.proof.certificate import certify
from merakc.passes.batches.recorded import BatchRecording
from merakc.passes.forward.fixed_values import check_lookups
from merakc.passes.forward.scaled_products import scaled_weights
from merakc.passes.pipeline import KEYED
from merakc.passes.running import run_passes


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
    shared: Shared | None = None,
    compared: Compared | None = None,
) -> BatchRecording:
    """Records the first part of this dp rank's batch, under the autocast that is on for `device`.

    Where there are several parts, the whole batch is recorded beside it: the two say what the parts
    make of every value. `couplings` says which samples are coupled, where any are; `dims` where
    they stand in the batch; `divided` that one part alone may be divided further. Random draws are
    keyed by the samples. With a `precision` the parameters and the batch's floating tensors are of
    the dtype that it computes in, and weights whose products it has in float8 are named. Calls with
    `shared` in common record no form of batch twice; forwards that others which were `compared`
    explain are recorded once. It raises `RecordError` as `record` and `analyse` do, and
    `ConfigError` where the device has no products of the precision.
    """
    dtype = precision.dtype("compute") if precision else None
    rounded = dtype if precision and precision.products else None
    if rounded:
        check_device(device, rounded)
    forward = Forward(
        model, *cast_floats(args, kwargs, dtype), layout, device,
        dtype=dtype, dims=dims, shared={} if shared is None else shared,
        compared=Compared() if compared is None else compared,
    )  # fmt: skip
    recording = _fitting(forward, couplings, divided=divided)
    if rounded is None:
        return recording
    states = None if recording.found is None else recording.found.states
    return replace(recording, scaled=scaled_weights(recording.graph, rounded, states))


def _fitting(forward: Forward, couplings: Couplings, *, divided: bool) -> BatchRecording:
    """The recording of a part, of which layers are in parts if there is a way to it.

    What costs least comes first: places that the batch says are then checked at every step, and
    shapes that it says are those for which a step is compiled.
    """
    made: BatchRecording | None = None
    refused: RecordError | None = None
    for settling, placing in ((False, False), (False, True), (True, True)):
        if settling and not forward.has_regions:
            break
        try:
            tried = forward.settled() if settling else forward
            found = _recorded_part(tried, couplings, divided=divided, placing=placing)
        except ForwardError:
            raise
        except RecordError as error:
            refused = refused or error
            continue
        if found.layout.parts == 1 or fit_of(found) is not Fit.REFUSED:
            return found
        made = made or found
    if made is None:
        assert refused is not None
        raise refused
    return made


def _recorded_part(
    forward: Forward, couplings: Couplings, *, divided: bool, placing: bool
) -> BatchRecording:
    """The recording of a part, and what was found of it."""
    layout, dims = forward.layout, forward.dims
    part = forward.part()
    check_lookups(part.graph)
    reads, of_whole = part.reads, None
    if layout.parts > 1 and read_whole(layout, couplings):
        reads, of_whole = None, forward.sized(layout.total).reads
    elif layout.parts > 1:
        parts = split_batch(forward.args, forward.kwargs, layout.micro_batches, dims)
        if layout.each == 1 and part is not forward.sized(1):
            check_read_alike(forward.sized(1).reads, forward.sized(2).reads)
        _check_parts(part, parts[1:], forward)
        of_whole = forward.of_whole()

    def sized(samples: int) -> Graph:
        return part.everything if samples == layout.each else forward.sized(samples).everything

    found, unchecked = None, ""
    if layout.parts > 1:
        with telling(forward.taken):
            each, total = layout.each, layout.total
            found = analysed(sized, forward.sampled, each, total, layout.least, placing=placing)
        loss = next((o for o in part.graph.outputs if o.kind is OutputKind.LOSS), None)
        if loss is not None and couplings == WHOLE_BATCH:
            unchecked = certify(found, loss, forward.rest(found))
        forward.learn()
    elif divided or any(n.op in KEY_POSITION for n in part.graph.nodes):
        with contextlib.suppress(Exception):  # a model of one size of batch alone is not divided
            found = analysed(sized, forward.sampled, layout.each, 2 * layout.each, layout.each)
            found = retaken(found, part.everything, part.everything, layout.each, layout.each)
    left = forward.sized(layout.total).left if part.left else ()
    aside = forward.aside(part, found if layout.parts > 1 else None)
    graph = part.graph
    if found is not None:
        graph = run_passes(KEYED, graph, found, layout.each)
    outputs = _outputs(part, forward.sized(layout.total)) if layout.parts > 1 else part.outputs
    return BatchRecording(
        graph, outputs, part.structure, aliases=part.aliases, model_name=part.model_name,
        numbers=part.numbers, checkpoints=part.checkpoints, asks=part.asks,
        reads=reads, finite=part.finite, layout=layout, found=found, couplings=couplings, dims=dims,
        unchecked=unchecked, of_whole=of_whole, of_batch=aside, aside=part.aside, left=left,
    )  # fmt: skip


def _outputs(part: Recording, whole: Recording) -> tuple[Any, ...]:
    """The leaves of what a part's forward returned, with the whole batch's in place of those that
    are no tensors, as counts and shapes.
    """
    if part.structure != whole.structure:
        return part.outputs
    names = {o.name for recording in (part, whole) for o in recording.graph.outputs}
    return tuple(
        own if isinstance(other, str) and other in names else other
        for own, other in zip(part.outputs, whole.outputs, strict=True)
    )


def read_whole(layout: BatchLayout, couplings: Couplings) -> bool:
    """Whether what a forward reads of its batch is what it reads of the whole of it, which is here.

    The parts compute what the recording of the whole batch does; of their own recordings only the
    calls are taken, never a number that Python was told of one of them. Other dp ranks' samples are
    not known, and by convention a micro-batch may stand for a batch of its own.
    """
    return layout.total == layout.own and couplings == WHOLE_BATCH


def _check_parts(recording: Recording, others: Sequence[Any], forward: Forward) -> None:
    """Raises `RecordError` where Python reads something else of another micro-batch, or may of the
    whole batch.
    """
    if recording.reads is None:
        return
    for number, (args, kwargs) in enumerate(others, 1):
        difference = recording.reads.difference(named_tensors(args, kwargs))
        if difference:
            raise RecordError(
                f"the forward reads other numbers of micro-batch {number} than of the first: "
                f"{difference}; one graph runs all micro-batches: pad them alike, keep the number "
                "in a tensor, or run the batch whole (micro_batches=1)"
            )
    unclear = forward.unsaid
    if unclear and forward.layout.total != forward.layout.own:
        raise RecordError(
            f"{unclear[0].source}: the forward reads a number ({unclear[0].answer}) of its part of "
            "the batch, and no other dp rank's part says what it is for the whole; keep it in a "
            "tensor (mask.sum().clamp(min=1)), leave padding in and mask the loss where it is "
            "of lengths (pack_padded_sequence), or train with dp=1"
        )


def analysed(
    sized: Callable[[int], Graph],
    sampled: Mapping[str, Rows],
    samples: int,
    total: int,
    least: int,
    *,
    placing: bool = False,
) -> Analysis:
    """What parts of so many samples make of the values of a forward; `sized` records it.

    Every rank looks at parts of the `least` samples, so that all come to the same; of one sample,
    no dim can be told from another of size 1: what holds for parts of two holds for it.
    """
    least, wide = two_sizes(least, total)
    found = analyse(sized(least), sized(wide), sampled, least, wide, placing=placing)
    if (samples, total) == (least, wide):
        return found
    return retaken(found, sized(samples), sized(total), samples, total)


def with_loss(recording: BatchRecording) -> BatchRecording:
    """The recording. Raises `ConfigError` where its forward returns no loss."""
    if not recording.has_loss and not any(i.requires_grad for i in recording.graph.inputs):
        raise ConfigError(
            f"the forward of {recording.model_name} returns no loss for this batch, and nothing "
            "that requires a gradient: a model that is never trained, as a teacher, is frozen "
            "after auto_parallel (requires_grad_(False)), and called under torch.no_grad()"
        )
    if not recording.has_loss:
        raise ConfigError(
            f"the forward of {recording.model_name} returns no loss for this batch; give it the "
            "labels, or give auto_parallel the loss of its outputs: loss=fn, fn(outputs, batch)"
        )
    return recording
