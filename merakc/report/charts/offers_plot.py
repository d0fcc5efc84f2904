"""Offers of machines side by side, as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from merakc.report.charts.scaling_plot import COLOUR
from merakc.report.units import format_count


def plot_offers(
    path: str | Path, labels: Sequence[str], panels: Mapping[str, Sequence[float]], *, title: str
) -> None:
    """A panel of bars for each quantity, a bar for each label. The suffix gives the format."""
    height = 1.2 + 0.5 * len(labels)
    figure = Figure(figsize=(3.0 + 2.6 * len(panels), height), layout="constrained")
    figure.suptitle(title)
    every = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (name, values) in zip(every, panels.items(), strict=True):
        bars = axes.barh(range(len(labels)), values, color=COLOUR)
        axes.bar_label(bars, [format_count(value) for value in values], padding=3, fontsize=8)
        axes.set_yticks(range(len(labels)), labels, fontsize=8)
        axes.set_xlim(0, 1.25 * max(values))
        axes.set_title(name, fontsize=10)
        axes.tick_params(axis="x", labelsize=7)
    every[0].invert_yaxis()
    figure.savefig(path, dpi=160)
