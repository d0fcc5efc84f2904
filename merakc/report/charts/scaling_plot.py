"""How throughput, utilisation and energy change with the number of devices, as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

COLOUR = "#0072B2"


def plot_scaling(
    path: str | Path,
    ranks: Sequence[int],
    panels: Mapping[str, Sequence[float]],
    labels: Sequence[str],
    *,
    title: str,
) -> None:
    """A panel for each quantity over the number of ranks. The suffix gives the format.

    `labels` are written beside the points of the first panel: the degrees of the plans.
    """
    figure = Figure(figsize=(4.2 * len(panels), 4.2), layout="constrained")
    figure.suptitle(title)
    for k, (name, values) in enumerate(panels.items(), 1):
        axes = figure.add_subplot(1, len(panels), k)
        axes.plot(ranks, values, color=COLOUR, marker="o")
        axes.set_xscale("log", base=2)
        axes.set_xticks(ranks, [f"{n:,}" for n in ranks], rotation=60, fontsize=8)
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set(xlabel="devices", ylim=(0, 1.15 * max(values)))
        axes.set_title(name, fontsize=10)
        axes.grid(visible=True, color="#DDDDDD", linewidth=0.6)
        if k == 1:
            for x, y, label in zip(ranks, values, labels, strict=True):
                axes.annotate(
                    label, (x, y), xytext=(0, -6), textcoords="offset points", rotation=90,
                    fontsize=6.5, ha="center", va="top",
                )  # fmt: skip
    figure.savefig(path, dpi=160)
