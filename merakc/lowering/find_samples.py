"""Finds where the samples of a batch stand, by recordings of its forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any

from merakc.batches.dims import ambiguous
from merakc.batches.split import dims_key, list_pattern
from merakc.errors import ConfigError, MerakError, OtherSizeError
from merakc.frontend.values.reads import ValuesNeededError
from merakc.ir.batches import WHOLE_BATCH, BatchDims, Rows
from merakc.ir.graph import InputKind, OutputKind
from merakc.passes.batches.proof.certificate import CertificateError
from merakc.passes.batches.recorded import BatchRecording
from merakc.passes.batches.split import split
from merakc.passes.batches.states import Kind
from merakc.passes.sharding.key_draws import has_draws

# Readings of a batch that are recorded where the likeliest does not hold: each takes as long as the
# first.
MOST_TRIED = 12


class Fit(IntEnum):
    """How well a reading of the batch fits the forward."""

    APART = 0  # the losses of parts add up
    COUPLED = 1  # by a head at the end
    REFUSED = 2  # samples meet before the layers


def find_samples(
    readings: Sequence[int],
    record: Callable[[int], BatchRecording],
    alone: Callable[[int], BatchRecording] | None = None,
    *,
    joined: bool = False,
) -> int:
    """Which of several readings of a batch, likeliest first, its forward fits.

    The first is taken where the losses of its parts add up, and where no other one fits; whoever
    uses it then gets its error. Where it fits no other number of samples, and another one does and
    fails elsewhere, that is it. `record` gives the recording under a reading, in the parts that are
    to be, and `alone` in one part, by which draws are keyed.

    In one replica every reading that fits gives the same step. Several dp ranks have batches that
    are joined in one way, which no forward can tell: where that may be the first (`joined`), and it
    is refused, it is taken, and so its error. Raises `ConfigError` where several others could be
    it, and `ValuesNeededError` as recordings do.
    """
    found = _fitting(readings, record, joined)
    if found != readings[0] and alone is not None and has_draws(record(found).graph):
        return _fitting(readings, alone, joined)
    return found


def _fitting(readings: Sequence[int], record: Callable[[int], BatchRecording], joined: bool) -> int:
    """The reading that the recordings fit."""
    first, *others = readings
    recording, told = _recorded(record, first), first
    sized = not isinstance(recording, OtherSizeError)
    fit = Fit.REFUSED if isinstance(recording, MerakError) else fit_of(recording)
    if fit is Fit.APART:
        return first
    if not isinstance(recording, MerakError) and fit is Fit.COUPLED and _all_sampled(recording):
        return first
    if fit is Fit.REFUSED and sized and joined:
        return first
    found: list[tuple[Fit, int, BatchRecording]] = []
    for reading in others[:MOST_TRIED]:
        recording = _recorded(record, reading)
        if isinstance(recording, MerakError):
            if not sized and not isinstance(recording, OtherSizeError):
                told, sized = reading, True
            continue
        if all(rows is None for _, rows in _read(recording)):
            continue  # of a forward that reads no samples each part would be the whole batch
        own = fit_of(recording)
        if own < fit:
            found.append((own, reading, recording))
        if own is Fit.APART and len(recording.layout.sizes) == 1:
            break  # all that fit give one step
    if not found:
        return told
    best = min(own for own, _, _ in found)
    fitting = [(reading, recording) for own, reading, recording in found if own is best]
    unlike: dict[Any, BatchDims] = {}
    for _, recording in fitting:
        unlike.setdefault(_read(recording), recording.dims)
    if len(unlike) > 1 and len(fitting[0][1].layout.sizes) > 1:
        raise ambiguous(list(unlike.values()))
    return fitting[0][0]


def check_lists(recording: BatchRecording, dims: BatchDims) -> None:
    """Raises `ConfigError` where several ranks have lists of tensors, and the `dims` that are said
    do not tell what dim 0 of each holds.

    The whole batch may be longer lists, of one tensor for each sample, or lists of longer tensors:
    a forward takes both.
    """
    inputs = [i.target for i in recording.graph.inputs if i.kind is InputKind.BATCH]
    unsaid = {n for n in inputs if list_pattern(n) != n and dims_key(n, dims) is None}
    if len(recording.layout.sizes) == 1 or not unsaid:
        return
    for name, rows in _read(recording):
        if rows is not None and name in unsaid:
            raise ConfigError(
                f"tensor {name!r} of the batch stands in a list, and data-parallel ranks have to "
                f"know how their lists make one batch: where dim {rows.dim} of each tensor holds "
                "all samples, give auto_parallel batch_dims="
                f"{{{list_pattern(name)!r}: {rows.dim}}}; where each is of one sample, give one "
                "tensor of them all (torch.stack, or torch.nn.utils.rnn.pad_sequence)"
            )


def _recorded(record: Callable[[int], BatchRecording], reading: int) -> BatchRecording | MerakError:
    """The recording under a reading, or why the forward does not take it."""
    try:
        return record(reading)
    except (ValuesNeededError, CertificateError):  # under any reading
        raise
    except MerakError as error:
        return error


def fit_of(recording: BatchRecording) -> Fit:
    """How the samples of a recorded part lie in its forward; those of a batch that is one part
    matter for what is drawn alone, which is to be as it would be in several.
    """
    found, whole = recording.found, recording.layout.parts == 1
    if whole and not has_draws(recording.graph):
        return Fit.APART
    if found is None:
        return Fit.REFUSED
    outputs = [o for o in recording.graph.outputs if o.kind is OutputKind.LOSS]
    if all(found.states[o.ref].kind is not Kind.COUPLED for o in outputs):
        return Fit.APART
    try:
        split(found, outputs, WHOLE_BATCH)
    except MerakError:
        return Fit.REFUSED
    return Fit.COUPLED


def _all_sampled(recording: BatchRecording) -> bool:
    """Whether every tensor of the batch that the forward reads holds samples."""
    return all(rows is not None for _, rows in _read(recording))


def _read(recording: BatchRecording) -> tuple[tuple[str, Rows | None], ...]:
    """Where the samples stand in those tensors of the batch that the forward reads."""
    graph = recording.graph.pruned().without_unread_inputs()
    sampled = recording.found.sampled if recording.found is not None else {}
    names = [i.target for i in graph.inputs if i.kind is InputKind.BATCH and i.spec.shape]
    return tuple((n, sampled.get(n)) for n in sorted(names))
