"""The timeline of a pipeline as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from merakc.errors import ConfigError
from merakc.files.printable import printable
from merakc.ir.program import ActionKind, Event
from merakc.report.charts.labels import ComputeLabel, parse_label

# Okabe and Ito's palette, which colour-blind readers can tell apart.
_KINDS = {
    ActionKind.FORWARD: ("forward", "#56B4E9"),
    ActionKind.BACKWARD: ("backward", "#E69F00"),
    ActionKind.INPUT_GRAD: ("input gradient", "#F0C75E"),
    ActionKind.WEIGHT_GRAD: ("weight gradient", "#009E73"),
    ActionKind.RECOMPUTE: ("recompute", "#0072B2"),
    ActionKind.HEAD: ("coupled loss", "#F0E442"),
    ActionKind.GATHER: ("gather", "#8C6BB1"),
    ActionKind.REDUCE: ("reduce", "#CC79A7"),
}
_IDLE_COLOUR = "#F2F2F2"
_WIDTH_INCHES = 12.0
_BOX_HEIGHT = 0.86  # of the distance between two ranks
_LANE_HEIGHT = 0.18  # of collectives
_MIN_FONT_POINTS, _MAX_FONT_POINTS = 4.0, 9.0  # below 4 points digits cannot be read
_DIGIT_WIDTH = 0.75  # of a digit, with its share of the margins, in units of the font size


def plot_timeline(
    path: str | Path,
    events: Sequence[Event],
    *,
    title: str = "Pipeline timeline",
    collectives: Sequence[Event] = (),
    waits: Sequence[Event] = (),
) -> None:
    """Draws a row a rank, a box an action with its micro-batch. The suffix gives the format.

    Waits are grey; those for collectives over dp, `waits`, are inside the boxes. Numbers are left
    out of boxes too narrow for them. Simulated `collectives` over dp, which run beside the actions,
    are drawn along the lower edge of their rank's row.
    Raises `ConfigError` where there is nothing to draw.
    """
    drawn = [e for e in events if e.kind in _KINDS and e.end_s > e.start_s]
    if not drawn:
        raise ConfigError(f"{path}: no forward, backward or reduction to draw")
    ranks = sorted({e.rank for e in drawn})
    end_s = max(e.end_s for e in (*drawn, *collectives))
    unit, per_second = _time_unit(end_s)
    size = _WIDTH_INCHES, min(40.0, 1.6 + 0.42 * len(ranks))
    figure = Figure(figsize=size, dpi=150, layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_facecolor(_IDLE_COLOUR)
    _draw_boxes(axes, drawn, ranks, per_second, _WIDTH_INCHES * 72 / end_s)
    axes.set(xlim=(0, end_s * per_second), ylim=(len(ranks) - 0.5, -0.5))
    title = printable(title).replace("$", r"\$")  # which would begin a formula
    axes.set(title=title, xlabel=f"time ({unit})", ylabel="rank")
    axes.set_yticks(range(len(ranks)), [str(r) for r in ranks])
    for row, rank in enumerate(ranks):
        still = [(e.start_s, e.end_s) for e in waits if e.rank == rank]
        _bars(axes, still, per_second, (row - _BOX_HEIGHT / 2, _BOX_HEIGHT), _IDLE_COLOUR)
        mine = [e for e in collectives if e.rank == rank]
        spans, lane = [(e.start_s, e.end_s) for e in mine], row + _BOX_HEIGHT / 2 - _LANE_HEIGHT
        _bars(axes, spans, per_second, (lane, _LANE_HEIGHT), [_KINDS[e.kind][1] for e in mine])
    _add_legend(figure, {e.kind for e in (*drawn, *collectives)})
    figure.savefig(path)


def _bars(
    axes: Axes, spans: Sequence[tuple[float, float]], per_second: float, at: tuple[float, float],
    colours: str | Sequence[str], **style: Any,
) -> None:  # fmt: skip
    """A bar for each span of seconds, at a place and of a height."""
    bars = [(start_s * per_second, (end_s - start_s) * per_second) for start_s, end_s in spans]
    axes.broken_barh(bars, at, facecolors=colours, **style)


def _draw_boxes(
    axes: Axes, events: Sequence[Event], ranks: Sequence[int], per_second: float,
    points_per_s: float,
) -> None:  # fmt: skip
    """A box an event, in its rank's row, in units of which `per_second` make a second."""
    digits = max(1, *(len(_micro_batch(e)) for e in events))
    for row, rank in enumerate(ranks):
        mine = [e for e in events if e.rank == rank]
        spans, colours = [(e.start_s, e.end_s) for e in mine], [_KINDS[e.kind][1] for e in mine]
        lines = [min(0.5, (end_s - start_s) * points_per_s / 10) for start_s, end_s in spans]
        at = row - _BOX_HEIGHT / 2, _BOX_HEIGHT
        _bars(axes, spans, per_second, at, colours, edgecolor="white", linewidths=lines)
        for event in mine:
            box_points = (event.end_s - event.start_s) * points_per_s
            font_points = min(_MAX_FONT_POINTS, box_points / (_DIGIT_WIDTH * digits))
            if font_points >= _MIN_FONT_POINTS:
                middle = (event.start_s + event.end_s) / 2 * per_second
                text = _micro_batch(event)
                axes.text(middle, row, text, ha="center", va="center", fontsize=font_points)


def _time_unit(span_s: float) -> tuple[str, float]:
    """The unit in which a time reads as a number of 1 or more, and how many make a second."""
    for unit, per_second in (("s", 1.0), ("ms", 1e3)):
        if span_s * per_second >= 1:
            return unit, per_second
    return "µs", 1e6


def _micro_batch(event: Event) -> str:
    label = parse_label(event.label)
    return str(label.micro_batch) if isinstance(label, ComputeLabel) else ""


def _add_legend(figure: Figure, kinds: set[ActionKind]) -> None:
    handles = [
        Patch(facecolor=colour, label=name)
        for kind, (name, colour) in _KINDS.items()
        if kind in kinds
    ]
    handles.append(Patch(facecolor=_IDLE_COLOUR, edgecolor="#BBBBBB", label="idle"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
