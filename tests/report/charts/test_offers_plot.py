"""Offers as a picture."""

from __future__ import annotations

from pathlib import Path

from merakc.report.charts.offers_plot import plot_offers


def test_a_picture_is_written(tmp_path: Path) -> None:
    panels = {"days": [12.0, 7.5], "price": [30_000.0, 41_000.0]}
    path = tmp_path / "a.svg"
    plot_offers(path, ["8 devices", "16 devices"], panels, title="a model")
    assert path.read_text().count("<svg") == 1
