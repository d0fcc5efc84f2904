"""A part of a batch, recorded, and what the whole batch says of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from merakc.batches.split import (
    cast_floats,
    named_tensors,
    resized,
    sample_rows,
    signature,
    split_batch,
    taken_dims,
)
from merakc.errors import ConfigError, ForwardError, OtherSizeError, RecordError, failure
from merakc.frontend.python.compared import Compared
from merakc.frontend.record import Recording, record, without_aside
from merakc.frontend.regions import WHY
from merakc.frontend.values.reads import Read, Reads
from merakc.ir.batches import BY_SIZE, WHOLE_BATCH, BatchDims, BatchLayout, Couplings, Rows
from merakc.ir.graph import Graph, OutputKind
from merakc.ir.precision import Precision
from merakc.kernels.draws import KEY_POSITION
from merakc.kernels.opaque import OPAQUE, find
from merakc.lowering.find_samples import Fit, fit_of
from merakc.passes.batches.alike import OtherPathError, check_read_alike, of_one_sample
from merakc.passes.batches.analyse import Analysis, analyse, retaken
from merakc.passes.batches.answers import unsaid
from merakc.passes.batches.part import known_name
from merakc.passes.batches.proof.certificate import certify
from merakc.passes.batches.recorded import BatchAside, BatchRecording
from merakc.passes.batches.split import known_alone, known_values
from merakc.passes.pipeline import KEYED, RECORDED
from merakc.passes.running import run_passes

# Recordings by whether shapes are settled and the form of the batch.
Shared = dict[tuple[bool, tuple[Any, ...]], Recording]


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
    the dtype that it computes in. Calls with `shared` in common record no form of batch twice;
    forwards that others which were `compared` explain are recorded once. It raises `RecordError` as
    `record` and `analyse` do.
    """
    dtype = precision.dtype("compute") if precision else None
    forward = _Forward(
        model, *cast_floats(args, kwargs, dtype), layout, device,
        dtype=dtype, dims=dims, shared={} if shared is None else shared, compared=compared,
    )  # fmt: skip
    return _fitting(forward, couplings, divided=divided)


def _fitting(forward: _Forward, couplings: Couplings, *, divided: bool) -> BatchRecording:
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
    forward: _Forward, couplings: Couplings, *, divided: bool, placing: bool
) -> BatchRecording:
    """The recording of a part, and what was found of it."""
    layout, dims = forward.layout, forward.dims
    part = forward.part()
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
        with _telling(forward.taken):
            each, total = layout.each, layout.total
            found = analysed(sized, forward.sampled, each, total, layout.least, placing=placing)
        loss = next((o for o in part.graph.outputs if o.kind is OutputKind.LOSS), None)
        if loss is not None and couplings == WHOLE_BATCH:
            unchecked = certify(found, loss, forward.rest(found))
    elif divided or any(n.op in KEY_POSITION for n in part.graph.nodes):
        with contextlib.suppress(Exception):  # a model of one size of batch alone is not divided
            found = analysed(sized, forward.sampled, layout.each, 2 * layout.each, layout.each)
            found = retaken(found, part.everything, part.everything, layout.each, layout.each)
    left = forward.sized(layout.total).left if part.left else ()
    aside = forward.aside(part, found if layout.parts > 1 else None)
    graph = part.graph
    if found is not None:
        graph = run_passes(KEYED, graph, found, layout.each)
    return BatchRecording(
        graph, part.outputs, part.structure, aliases=part.aliases, model_name=part.model_name,
        numbers=part.numbers, checkpoints=part.checkpoints,
        reads=reads, finite=part.finite, layout=layout, found=found, couplings=couplings, dims=dims,
        unchecked=unchecked, of_whole=of_whole, of_batch=aside, aside=part.aside, left=left,
    )  # fmt: skip


def read_whole(layout: BatchLayout, couplings: Couplings) -> bool:
    """Whether what a forward reads of its batch is what it reads of the whole of it, which is here.

    The parts compute what the recording of the whole batch does; of their own recordings only the
    calls are taken, never a number that Python was told of one of them. Other dp ranks' samples are
    not known, and by convention a micro-batch may stand for a batch of its own.
    """
    return layout.total == layout.own and couplings == WHOLE_BATCH


class _Forward:
    """A model's forward of one batch, with any number of its samples, each recorded once."""

    def __init__(
        self,
        model: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        layout: BatchLayout,
        device: torch.device,
        dtype: torch.dtype | None,
        dims: BatchDims,
        shared: Shared,
        compared: Compared | None,
    ) -> None:
        self.model, self.args, self.kwargs = model, args, kwargs
        self.shared, self.compared = shared, compared
        self.layout, self.device, self.dtype, self.dims = layout, device, dtype, dims
        self.sampled = sample_rows(args, kwargs, dims)
        tensors = {n: t for n, t in named_tensors(args, kwargs).items() if t.dim()}
        self.taken = taken_dims({n: self.sampled.get(n) for n in tensors})
        self.known: dict[int, Recording] = {}
        self.settling = False

    @property
    def has_regions(self) -> bool:
        """Whether shapes depend on values in what was recorded, and need not."""
        made = self.known.get(self.layout.each)
        nodes = made.graph.nodes if made is not None and not self.settling else ()
        return any(n.op == OPAQUE and find(n.args[-1]).reason == WHY for n in nodes)

    def settled(self) -> _Forward:
        """The same, with the shapes that the batch says."""
        now = copy(self)
        now.known, now.settling = {}, True
        vars(now).pop("unsaid", None)
        return now

    def part(self) -> Recording:
        """The recording of the first part."""
        layout = self.layout
        part = self.sized(layout.each)
        return part if layout.each > 1 or layout.parts == 1 else self.one()

    def one(self) -> Recording:
        """The recording of one sample as a part of the batch."""
        alone, two, wide = self.sized(1), self.sized(2), _wide(self.layout.total)
        with _telling(self.taken):
            graphs = (alone.everything, two.everything, self.sized(wide).everything)
            graph = of_one_sample(*graphs, wide)
        if graph is alone.everything:
            return alone
        full, step = (graph, without_aside(graph)) if two.aside else (None, graph)
        # Two samples are told what one says; of a part of one only that one's numbers can be asked.
        return replace(two, graph=step, full=full, reads=alone.reads)

    def rest(self, found: Analysis) -> Analysis | None:
        """What is found of the samples behind as many parts of equal size as there are, if any."""
        left = found.total % found.samples
        if not left:
            return None
        try:
            graph = (self.one() if left == 1 else self.sized(left)).everything
            return retaken(found, graph, found.whole, left, found.total)
        except RecordError:  # a size of part that no rank has
            return None

    def of_whole(self) -> Reads | None:
        """What Python has read of the whole batch, where that of its parts does not say it."""
        return self.sized(self.layout.total).reads if self.unsaid else None

    @cached_property
    def unsaid(self) -> Sequence[Read]:
        """What Python reads of which the parts do not say what it is for the whole batch."""
        layout, own = self.layout, self.sized(self.layout.each).reads
        if layout.parts == 1 or own is None:
            return ()
        least, wide = _compared(layout.least, layout.total)
        part, whole = self.sized(least).reads, self.sized(wide).reads
        if part is None or len(part.asked) != len(own.asked):
            return own.asked
        return unsaid(part, whole, self.sampled, least, wide)

    def sized(self, samples: int) -> Recording:
        """The recording for so many samples: a part and this rank's batch with their values."""
        if samples not in self.known:
            self.known[samples] = self._sized(samples)
        return self.known[samples]

    def _sized(self, samples: int) -> Recording:
        layout = self.layout
        if samples == layout.each:
            parts = split_batch(self.args, self.kwargs, layout.micro_batches, self.dims)
            return self._recorded(samples, *parts[0])
        if samples == layout.own:
            return self._recorded(samples, self.args, self.kwargs)
        return self._recorded(samples, *resized(self.args, self.kwargs, self.sampled, samples))

    def _recorded(self, samples: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Recording:
        layout, form = self.layout, (self.settling, signature(args, kwargs))
        if form in self.shared:
            return self.shared[form]
        # Once for each way is a second forward compared.
        repeated = samples == layout.each and all(s is not self.settling for s, _ in self.shared)
        with torch.autocast("cpu", *autocast_of(self.device)):  # fake tensors are of the CPU
            try:
                told = self.sized(layout.each).reads if samples != layout.each else None
                made = record(
                    self.model, args, kwargs, self.dtype, told.answers if told else (),
                    settling=self.settling, repeated=repeated, compared=self.compared,
                )  # fmt: skip
            except ForwardError as error:
                if samples == layout.own or self._fails():
                    raise
                cause = error.__cause__ or error
                raise _other_size(samples, layout.own, self.taken, cause) from error
        graph = run_passes(RECORDED, made.everything)
        of_full = {"graph": without_aside(graph), "full": graph} if made.full else {"graph": graph}
        made = replace(made, **of_full)
        if made.reads is None:  # no value of the batch was asked for
            self.shared[form] = made
        return made

    def aside(self, part: Recording, found: Analysis | None) -> BatchAside:
        """What the forward does beside computing, of the whole batch; `found` is of its parts."""
        outputs = [o for o in part.everything.outputs if o.kind is OutputKind.ASIDE]
        known = known_values(found, outputs) if found else known_alone(part.everything, outputs)
        names = {o.name: known_name(o.ref) for o in outputs}
        edits = self.sized(self.layout.own).aside.edits if part.aside.edits else ()
        return BatchAside(known, names, part.aside.checks, part.aside.writes, edits)

    def _fails(self) -> bool:
        """Whether the forward fails for the batch as it was given."""
        try:
            record(self.model, self.args, self.kwargs, self.dtype)
        except ForwardError:
            return True
        except RecordError:
            return False
        return False


def _check_parts(recording: Recording, others: Sequence[Any], forward: _Forward) -> None:
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
            "tensor (mask.sum().clamp(min=1)), or train with dp=1"
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
    least, wide = _compared(least, total)
    found = analyse(sized(least), sized(wide), sampled, least, wide, placing=placing)
    if (samples, total) == (least, wide):
        return found
    return retaken(found, sized(samples), sized(total), samples, total)


@contextlib.contextmanager
def _telling(taken: str) -> Iterator[None]:
    """Adds to errors of other paths where samples were taken to stand."""
    try:
        yield
    except OtherPathError as error:
        raise RecordError(f"{error}; {taken}") from error


def _compared(least: int, total: int) -> tuple[int, int]:
    """The numbers of samples of the two recordings that are compared, for parts of `least`."""
    least = max(least, 2)
    return least, total if total > least else _wide(total)


def _wide(total: int) -> int:
    """A number of samples to compare two of them with, for a batch of `total`."""
    return total if total > 2 else 2 * total


def _other_size(samples: int, own: int, taken: str, error: BaseException) -> OtherSizeError:
    """The error for a forward that takes no other number of samples than the batch has."""
    return OtherSizeError(
        f"the forward takes the batch of {own} samples, and fails for {samples} of them "
        f"({failure(error)}); {taken}; if the model is for one size of batch, train with dp=1 and "
        "micro_batches=1"
    )


def with_loss(recording: BatchRecording) -> BatchRecording:
    """The recording. Raises `ConfigError` where its forward returns no loss."""
    if not recording.has_loss:
        raise ConfigError(
            f"the forward of {recording.model_name} returns no loss for this batch; give it the "
            "labels, or give auto_parallel the loss of its outputs: loss=fn, fn(outputs, batch)"
        )
    return recording


def autocast_of(device: torch.device) -> tuple[torch.dtype, bool]:
    """The dtype of autocast on a device, and whether it is on."""
    return torch.get_autocast_dtype(device.type), torch.is_autocast_enabled(device.type)
