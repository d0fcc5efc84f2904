"""What each pass did to a model: nodes, bytes and seconds before and after it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from merakc.analysis.aliases import FREE
from merakc.costs.device import Place
from merakc.costs.nodes import graph_seconds
from merakc.ir.graph import Graph
from merakc.ir.program import StageGraphs
from merakc.passes.pipeline import PIPELINE
from merakc.passes.running import Pass, graphs_of
from merakc.report.tables import Fitted
from merakc.report.units import format_bytes, format_seconds

FIGURES = ("nodes", "bytes", "seconds")
COLUMNS = {"pass": False, "runs": True} | {
    name: True for figure in FIGURES for name in (figure, f"{figure} after")
}


@dataclass(frozen=True, slots=True)
class Size:
    """How large a value of the pipeline is.

    Of graphs, `bytes` are those of all values that its nodes write, and `seconds` those of running
    each graph once. Of Programs, nodes are actions and bytes those of messages.
    """

    nodes: int = 0
    size_bytes: int = 0
    seconds: float = 0.0

    def __add__(self, other: Size) -> Size:
        return Size(
            self.nodes + other.nodes,
            self.size_bytes + other.size_bytes,
            self.seconds + other.seconds,
        )


@dataclass(frozen=True, slots=True)
class PassEffect:
    """One run of a pass, or several together: how large the values were before and after."""

    name: str
    runs: int
    before: Size
    after: Size

    def __add__(self, other: PassEffect) -> PassEffect:
        before, after = self.before + other.before, self.after + other.after
        return PassEffect(self.name, self.runs + other.runs, before, after)


def pass_effect(each: Pass, given: Any, made: Any, place: Place) -> PassEffect:
    """What one run of a pass did, with its graphs run by a rank."""
    before = value_size(given, place)
    return PassEffect(each.name, 1, before, before if made is given else value_size(made, place))


def value_size(value: Any, place: Place) -> Size:
    """How large a value is that a pass takes or gives; of a stage, what a micro-batch runs."""
    graphs = _executed(value) if isinstance(value, StageGraphs) else graphs_of(value)
    if not graphs:
        sizes = (Size(len(p.actions), sum(a.size_bytes for a in p.actions)) for p in value)
        return sum(sizes, Size())
    return sum((_graph_size(graph, place) for graph in graphs), Size())


def _executed(stage: StageGraphs) -> tuple[Graph, ...]:
    """The pieces that a micro-batch runs: those that replace others, in their place."""
    forward = (stage.checkpoint or stage.forward, stage.recompute)
    apart = (stage.input_grad, stage.weight_grad)
    every = (*forward, *(apart if stage.input_grad else (stage.backward,)))
    return tuple(graph for graph in every if graph is not None)


def _graph_size(graph: Graph, place: Place) -> Size:
    written = (o for n in graph.nodes if n.op not in FREE for o in n.outputs if o is not None)
    return Size(len(graph.nodes), sum(o.size_bytes for o in written), graph_seconds(graph, place))


def effects_table(effects: Iterable[PassEffect]) -> Fitted:
    """A row for each pass, in the order of the pipeline, with all its runs added up; `=` where a
    figure stays as it was.
    """
    total: dict[str, PassEffect] = {}
    for effect in effects:
        total[effect.name] = total[effect.name] + effect if effect.name in total else effect
    return Fitted(COLUMNS, [_row(total[p.name]) for p in PIPELINE if p.name in total])


def _row(effect: PassEffect) -> tuple[str, ...]:
    pairs = zip(_shown(effect.before), _shown(effect.after), strict=True)
    figures = (text for old, new in pairs for text in (old, "=" if new == old else new))
    return (effect.name, f"{effect.runs}", *figures)


def _shown(size: Size) -> tuple[str, str, str]:
    seconds = format_seconds(size.seconds) if size.seconds else "-"
    return f"{size.nodes:,}", format_bytes(size.size_bytes), seconds
