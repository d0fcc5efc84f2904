"""A recorded part of a batch, with what the recording of the whole batch says of it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

from merakc.errors import ConfigError, RecordError
from merakc.frontend.aside import Check, Edit
from merakc.frontend.record import Recording
from merakc.frontend.values.reads import Reads
from merakc.ir.batches import (
    WHOLE_BATCH,
    BatchDims,
    BatchLayout,
    BatchSplit,
    Couplings,
    Known,
    Rows,
)
from merakc.ir.graph import Graph, Output, OutputKind
from merakc.passes.batches.analyse import Analysis
from merakc.passes.batches.split import split


@dataclass(frozen=True)
class BatchAside:
    """What the forward does to its batch and checks of it; `known` computes the values, before the
    step. `names` are those that these have there, by the names of the recording's outputs.
    """

    known: Known | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    checks: tuple[Check, ...] = ()
    writes: tuple[tuple[str, str], ...] = ()
    edits: tuple[Edit, ...] = ()

    def __bool__(self) -> bool:
        return self.known is not None or bool(self.edits)


@dataclass(frozen=True)
class BatchRecording(Recording):
    """The recording of one part of a batch that lies as `layout` says.

    `found` is what the parts make of its values. Where the whole batch is one part it is None, or
    says what parts of that one would make of them. `couplings` says what samples that are coupled
    are coupled with: those of the whole batch, or of their micro-batch. `dims` says where samples
    stand in the batch, where sizes do not. `unchecked` says why the parts were not compared with
    the whole batch by numbers, if they were not. `scaled` are the weights whose products are to be
    in float8. `of_whole` is what Python has read of the whole
    batch, where its parts do not say that as well, `of_batch` what is done beside computing.
    """

    layout: BatchLayout = field(default=BatchLayout((1,), 1), kw_only=True)
    found: Analysis | None = field(default=None, kw_only=True)
    couplings: Couplings = field(default=WHOLE_BATCH, kw_only=True)
    dims: BatchDims = field(default_factory=dict, kw_only=True)
    unchecked: str = field(default="", kw_only=True)
    scaled: frozenset[str] = field(default=frozenset(), kw_only=True)
    of_whole: Reads | None = field(default=None, kw_only=True)
    of_batch: BatchAside = field(default_factory=BatchAside, kw_only=True)


def in_parts(
    recording: Recording,
    parts: int,
    kinds: tuple[OutputKind, ...] = (),
    kept: Collection[str] = (),
) -> BatchSplit:
    """The step of a recorded part of a batch of so many, for outputs of these kinds, or all, and
    for the results whose names are `kept`.

    Raises `RecordError` where the batch cannot be in parts, `ConfigError` where its one sample
    would have to be.
    """
    graph = recording.graph
    found = recording.found if isinstance(recording, BatchRecording) else None
    given = found.part.outputs if found is not None and parts > 1 else graph.outputs
    given = tuple(o for o in given if o.kind is not OutputKind.ASIDE)
    outputs = tuple(o for o in given if not kinds or o.kind in kinds or _is_kept(o, kept))
    if (kept or not kinds or OutputKind.RESULT in kinds) and len(given) < len(graph.outputs):
        raise RecordError(
            f"the forward of {recording.model_name} returns another number of tensors for the "
            "whole batch than for a part of it, as a list with one for each sample; return them as "
            "one tensor, or ask for the loss alone"
        )
    told = recording.aside.unheard
    made = _split(recording, found, parts, outputs)
    if isinstance(recording, BatchRecording):
        made = replace(made, scaled=recording.scaled)
    return replace(made, conventions=(*made.conventions, *told)) if told else made


def _is_kept(out: Output, kept: Collection[str]) -> bool:
    return out.kind is OutputKind.RESULT and out.name in kept


def _split(
    recording: Recording, found: Analysis | None, parts: int, outputs: tuple[Output, ...]
) -> BatchSplit:
    if parts == 1:
        if found is not None and found.share == 1:
            # Written as parts are, so that it can be run in parts of its own; a head needs none.
            with suppress(RecordError):
                alone = split(found, outputs)
                if alone.head is None:
                    return alone
        return BatchSplit(with_outputs(recording.graph, outputs))
    if found is None:
        raise ConfigError(
            f"this forward of {recording.model_name} was recorded for a batch that is one part, "
            f"and there are to be {parts}; record it for as many"
        )
    assert isinstance(recording, BatchRecording)
    made = split(found, outputs, recording.couplings)
    if not recording.unchecked:
        return made
    told = f"proved, and not compared by numbers: {recording.unchecked}"
    return replace(made, conventions=(*made.conventions, told))


def couplings_of(recording: Recording) -> Couplings:
    """Which samples are coupled, where any are."""
    return recording.couplings if isinstance(recording, BatchRecording) else WHOLE_BATCH


def dims_of(recording: Recording) -> dict[str, Rows | None]:
    """Where samples stand in the batch, where sizes do not say."""
    return dict(recording.dims) if isinstance(recording, BatchRecording) else {}


def rows_of(recording: Recording, split: BatchSplit) -> dict[str, Rows | None]:
    """Where the samples stand in what a step brings, by the target of the graph's input."""
    found = recording.found if isinstance(recording, BatchRecording) else None
    own: Mapping[str, Rows] = found.sampled if found is not None else {}
    return {**own, **(split.known.rows if split.known is not None else {})}


def with_outputs(graph: Graph, outputs: tuple[Output, ...]) -> Graph:
    """The graph with these outputs, and nothing that they do not need."""
    return replace(graph, outputs=outputs).pruned().without_unread_inputs()
