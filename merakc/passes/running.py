"""How passes run: one after the other, each result checked, and told to whoever watches."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from merakc.frontend.record import Recording
from merakc.ir.batches import BatchSplit
from merakc.ir.graph import Graph
from merakc.ir.program import Program, StageGraphs
from merakc.passes.stages.stage import Stages

# Whether the result of every pass is verified. The tests set the variable.
CHECKED: Final = os.environ.get("MERAKC_CHECK") == "1"


class Kind(StrEnum):
    """What a pass takes or gives."""

    RECORDED = "recorded forward"
    PART = "forward of a part of the batch"
    STAGE = "forward of a stage"
    LOCAL = "forward of a stage on one rank"
    JOINT = "forward and backward in one graph"
    PIECES = "forward and backward apart"
    PROGRAMS = "lists of actions"


@dataclass(frozen=True, slots=True)
class Pass:
    """A pure function from value to value, by name; `run` also gets the options of its list.

    `does` says in one sentence what it is for. Where there is nothing to do, `run` gives back the
    very value that it was given.
    """

    name: str
    does: str
    takes: Kind
    gives: Kind
    run: Callable[..., Any]


# Is told of a pass, what it was given and gave, and how many CPU seconds it took.
Watcher = Callable[[Pass, Any, Any, float], None]
_watchers: list[Watcher] = []


def run_passes(passes: Sequence[Pass], value: Any, *options: Any, **named: Any) -> Any:
    """What the passes make of a value, one after the other, each with the same options.

    Raises `AssertionError`, with the pass's name, where a result is checked and is malformed.
    """
    for each in passes:
        value = _run(each, value, *options, **named)
    return value


def _run(each: Pass, value: Any, *options: Any, **named: Any) -> Any:
    start_s = time.process_time() if _watchers else 0.0
    made = each.run(value, *options, **named)
    if made is not value and CHECKED:
        try:
            verify(made)
        except AssertionError as error:
            raise AssertionError(f"the pass '{each.name}' broke its graph: {error}") from error
    for tell in _watchers:
        tell(each, value, made, time.process_time() - start_s)
    return made


def verify(value: Any) -> None:
    """Asserts that everything in what a pass gives is well-formed."""
    if isinstance(value, (Graph, StageGraphs)):
        value.verify()
    elif isinstance(value, tuple):  # of Programs
        for program in value:
            program.verify()
    else:
        for graph in graphs_of(value):
            graph.verify()


def graphs_of(value: Any) -> tuple[Graph, ...]:
    """The graphs in what a pass takes or gives; none in Programs."""
    match value:
        case Graph():
            return (value,)
        case Recording():
            return (value.graph,)
        case Stages():
            return value.graphs
        case StageGraphs():
            return value.graphs
        case BatchSplit():
            known, head = value.known, value.head
            heads = [h.graph for h in (known.whole if known else None, head) if h is not None]
            return (value.graph, *heads, *((known.part,) if known else ()))
        case _:
            assert all(isinstance(item, Program) for item in value), type(value)
            return ()


@contextmanager
def watched(tell: Watcher) -> Iterator[None]:
    """While it is open, `tell` is called for every pass that has run."""
    _watchers.append(tell)
    try:
        yield
    finally:
        _watchers.remove(tell)


@contextmanager
def unwatched() -> Iterator[None]:
    """While it is open, nobody is told: of passes that one pass runs to compare, say."""
    watchers = _watchers[:]
    _watchers.clear()
    try:
        yield
    finally:
        _watchers[:] = watchers
