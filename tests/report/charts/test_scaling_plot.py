"""The picture of a sweep."""

from __future__ import annotations

from pathlib import Path

from merakc.report.charts.scaling_plot import plot_scaling


def test_a_panel_for_each_quantity(tmp_path: Path) -> None:
    path = tmp_path / "scaling.svg"
    panels = {"speed": [2.0, 1.0], "power": [3.0, 2.0]}
    plot_scaling(path, [8, 16], panels, ["dp 8", "dp 16"], title="a model on some machines")
    assert path.read_text().startswith("<?xml")
    one = tmp_path / "one.svg"
    plot_scaling(one, [8, 16], {"speed": [2.0, 1.0]}, ["dp 8", "dp 16"], title="a model")
    assert len(one.read_text()) < len(path.read_text())
