"""Sweeps over numbers of devices."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

import pytest

from merakc.errors import ConfigError
from merakc.machines.cluster import Cluster
from merakc.machines.cluster_files import hardware_for
from merakc.planner.offline import Recordings, plan_offline
from merakc.planner.request import Request
from merakc.planner.scaling import WAITING_POWER, sweep, write_csv
from merakc.planner.sources import load_source


def at(name: str) -> Callable[[int], Cluster]:
    return lambda ranks: hardware_for(name, ranks).flat("float32")


def recordings() -> Recordings:
    return Recordings(load_source("tests.small_source:small"), Request(0, 0), lambda _: None)


def test_a_sweep_in_figures(tmp_path: Path) -> None:
    request = Request(0, 0, tp=1, pp=1)
    points = sweep(recordings(), request, at("h100"), (8, 16, 32), 2.0, None)
    assert [p.ranks for p in points] == [8, 16, 32]
    assert [p.strategy.total_batch_size for p in points] == [16, 32, 64]
    for p in points:
        assert (p.strategy.dp, p.strategy.tp, p.strategy.pp) == (p.ranks, 1, 1)
        assert p.row["tokens_per_s"] == pytest.approx(p.strategy.total_batch_size / p.step_s)
        assert 0 < p.mfu < 1
        assert 700 * WAITING_POWER <= p.power_w <= 700
        assert p.tokens_per_joule == pytest.approx(p.tokens_per_s_per_rank / p.power_w)
    path = tmp_path / "points.csv"
    write_csv(points, path)
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["ranks"]) for row in rows] == [8, 16, 32]
    strong = sweep(recordings(), request, at("h100"), (8, 16), None, 64)
    assert [p.strategy.total_batch_size for p in strong] == [64, 64]


def test_each_plan_is_that_of_merakc_plan() -> None:
    source = load_source("tests.small_source:deep")
    record = Recordings(source, Request(0, 0), lambda _: None)
    for point in sweep(record, Request(0, 0), at("h100"), (4, 8), None, 16):
        asked = Request(point.ranks, 0)
        lowered, _ = plan_offline(source, asked, 16, at("h100")(point.ranks))
        assert lowered.prediction is not None
        assert point.strategy == lowered.plan.strategy
        assert point.step_s == pytest.approx(lowered.prediction.step_s, rel=1e-9)


def test_unlike_devices_draw_what_each_of_them_does(tmp_path: Path) -> None:
    path = tmp_path / "mixed.toml"
    path.write_text(
        'name = "mixed"\n'
        '[[nodes]]\ndevice = "h100"\ndevices = 8\n[[nodes]]\ndevice = "a100-40"\ndevices = 8\n'
        '[[links]]\nname = "wire"\ndevices = 16\nbytes_per_s = 1e11\n'
    )
    request = Request(0, 0, tp=1, pp=1)
    (found,) = sweep(recordings(), request, at(str(path)), (16,), 2.0, None)
    mean_w = (700 + 400) / 2
    assert mean_w * WAITING_POWER <= found.power_w <= mean_w
    slow = tmp_path / "slow.toml"
    slow.write_text(path.read_text().replace("h100", "a100-40"))
    (alike,) = sweep(recordings(), request, at(str(slow)), (16,), 2.0, None)
    assert found.step_s == pytest.approx(alike.step_s)
    assert found.mfu == pytest.approx(alike.mfu * 2 * 156 / (156 + 494.5))


def test_one_way_to_scale() -> None:
    for given in ((None, None), (1.0, 8)):
        with pytest.raises(ConfigError, match="strong scaling, or samples a rank for weak"):
            sweep(recordings(), Request(0, 0), at("h100"), (8,), *given)


@pytest.mark.parametrize("samples", [0.0, float("inf"), float("nan")])
def test_samples_a_rank_are_a_number_above_0(samples: float) -> None:
    with pytest.raises(ConfigError, match="give a number above 0"):
        sweep(recordings(), Request(0, 0), at("h100"), (8,), samples, None)


def test_what_divides_nothing_is_refused_with_its_numbers() -> None:
    with pytest.raises(ConfigError, match="tp=3 does not multiply to 8 ranks"):
        sweep(recordings(), Request(0, 0, tp=3), at("h100"), (8,), 2.0, None)
    with pytest.raises(ConfigError, match="recompute 'some' is not known"):
        sweep(recordings(), Request(0, 0, recompute="some"), at("h100"), (8,), 2.0, None)
