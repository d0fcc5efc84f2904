"""A recorded part of a batch, with what the recording of the whole batch says of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from merakc.errors import ConfigError
from merakc.frontend.record import Recording
from merakc.ir.batches import BatchLayout, BatchSplit, Rows
from merakc.ir.graph import Graph, Output, OutputKind
from merakc.passes.batches.analyse import Analysis
from merakc.passes.batches.split import split


@dataclass(frozen=True)
class BatchRecording(Recording):
    """The recording of one part of a batch that lies as `layout` says.

    `found` is what the parts make of its values. Where the whole batch is one part it is None, or
    says what parts of that one would make of them.
    """

    layout: BatchLayout = field(default=BatchLayout((1,), 1), kw_only=True)
    found: Analysis | None = field(default=None, kw_only=True)


def in_parts(recording: Recording, parts: int, kinds: tuple[OutputKind, ...] = ()) -> BatchSplit:
    """The step of a recorded part of a batch of so many, for outputs of these kinds, or all.

    Raises `RecordError` where the batch cannot be in parts, `ConfigError` where its one sample
    would have to be.
    """
    graph = recording.graph
    outputs = tuple(o for o in graph.outputs if not kinds or o.kind in kinds)
    found = recording.found if isinstance(recording, BatchRecording) else None
    if parts == 1:
        alone = split(found, outputs) if found is not None and found.share == 1 else None
        # Written as parts are, so that it can be run in parts of its own; a head needs none.
        if alone is not None and alone.head is None:
            return alone
        return BatchSplit(with_outputs(graph, outputs))
    if found is None:
        raise ConfigError(
            f"this forward of {recording.model_name} was recorded for a batch that is one part, "
            f"and there are to be {parts}; record it for as many"
        )
    return split(found, outputs)


def rows_of(recording: Recording, split: BatchSplit) -> dict[str, Rows | None]:
    """Where the samples stand in what a step brings, by the target of the graph's input."""
    found = recording.found if isinstance(recording, BatchRecording) else None
    own: Mapping[str, Rows] = found.sampled if found is not None else {}
    return {**own, **(split.known.rows if split.known is not None else {})}


def with_outputs(graph: Graph, outputs: tuple[Output, ...]) -> Graph:
    """The graph with these outputs, and nothing that they do not need."""
    return replace(graph, outputs=outputs).pruned().without_unread_inputs()
