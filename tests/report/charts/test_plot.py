"""Pictures: written, of a sensible size, and with the right things in them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from matplotlib.image import imread

from merakc.errors import ConfigError
from merakc.ir.costs import CostTable, StageCost
from merakc.ir.program import ActionKind, Event, Mesh
from merakc.passes.programs.schedule import build_programs
from merakc.report.charts.plot import plot_timeline
from merakc.schedules.registry import make_schedule
from merakc.simulation.simulate import simulate


def _events(stages: int, micro_batches: int) -> tuple[Event, ...]:
    programs = build_programs(Mesh(pp=stages), make_schedule("gpipe", stages, micro_batches), ())
    costs = CostTable((StageCost(1e-3, 2e-3, reduce_s=1e-3),) * stages, 0.0, 1.0)
    return simulate(programs, costs).events


def _texts(path: Path) -> list[str]:
    """What an SVG says: matplotlib draws letters as paths, under a comment with the text."""
    return re.findall(r"<!-- (.*?) -->", path.read_text())


def _colours(path: Path) -> set[str]:
    """The colours of a picture that cover a thousandth of it or more."""
    pixels = (imread(path)[..., :3] * 255).round().astype(int).reshape(-1, 3)
    counts: dict[str, int] = {}
    for r, g, b in pixels.tolist():
        name = f"#{r:02X}{g:02X}{b:02X}"
        counts[name] = counts.get(name, 0) + 1
    return {name for name, count in counts.items() if count * 1000 >= len(pixels)}


def test_timeline_has_a_number_a_box_and_a_legend(tmp_path: Path) -> None:
    path = tmp_path / "t.svg"
    plot_timeline(path, _events(2, 13), title="two stages")
    texts = _texts(path)
    assert texts.count("12") == 2 * 2  # forward and backward on both ranks; no tick says 12
    assert {"two stages", "time (ms)", "rank", "forward", "backward", "reduce", "idle"} <= {*texts}
    assert "weight gradient" not in texts


def test_timeline_without_room_has_no_numbers(tmp_path: Path) -> None:
    path = tmp_path / "t.svg"
    plot_timeline(path, _events(1, 400))
    assert "399" not in _texts(path)


def test_events_without_duration_are_not_drawn(tmp_path: Path) -> None:
    path = tmp_path / "t.svg"
    plot_timeline(path, [*_events(1, 1)[:2], Event(0, "reduce 0", ActionKind.REDUCE, 3e-3, 3e-3)])
    assert "reduce" not in _texts(path)
    assert "forward" in _texts(path)


def test_timeline_png_is_coloured(tmp_path: Path) -> None:
    path = tmp_path / "t.png"
    plot_timeline(path, _events(4, 8))
    assert imread(path).shape[1] >= 1500
    assert {"#56B4E9", "#E69F00", "#CC79A7"} <= _colours(path)


def test_nothing_to_draw_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no forward, backward or reduction"):
        plot_timeline(tmp_path / "t.png", [Event(0, "recv", ActionKind.RECV, 0.0, 1.0)])


def test_collectives_lie_along_the_rows(tmp_path: Path) -> None:
    events = [Event(0, "0F0", ActionKind.FORWARD, 0.0, 1.0)]
    collectives = [Event(0, "gather 0:0", ActionKind.GATHER, 0.0, 2.0)]
    plot_timeline(tmp_path / "t.png", events, collectives=collectives)
    assert {"#56B4E9", "#8C6BB1"} <= _colours(tmp_path / "t.png")
    plot_timeline(tmp_path / "t.svg", events, collectives=collectives)
    assert "gather" in _texts(tmp_path / "t.svg")
    plot_timeline(tmp_path / "plain.svg", events)
    assert "gather" not in _texts(tmp_path / "plain.svg")


def test_waits_for_collectives_are_no_computing(tmp_path: Path) -> None:
    events = [Event(0, "0F0", ActionKind.FORWARD, 0.0, 1.0)]
    waits = [Event(0, "gather 0:0", ActionKind.GATHER, 0.0, 0.75)]
    blue = {}
    for name, given in (("busy", []), ("waiting", waits)):
        plot_timeline(path := tmp_path / f"{name}.png", events, waits=given)
        pixels = (imread(path)[..., :3] * 255).round().astype(int)
        blue[name] = int((pixels == (0x56, 0xB4, 0xE9)).all(-1).sum())
    assert 0.2 < blue["waiting"] / blue["busy"] < 0.35
