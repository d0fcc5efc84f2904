"""What machines offer a job."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from merakc.ir.strategy import Strategy
from merakc.machines.cluster import Cluster
from merakc.machines.cluster_files import hardware_for
from merakc.planner.offers import (
    DOUBLINGS,
    Case,
    Offer,
    Offers,
    distinctions,
    neighbours,
    write_csv,
)
from merakc.planner.offline import plan_offline
from merakc.planner.request import Request
from merakc.planner.sources.source import load_source
from merakc.report.analysis import WAITING_POWER
from merakc.report.yields import Goal
from tests.ir.test_report import STEP


def at(name: str, ranks: int) -> Cluster:
    return hardware_for(name, ranks).flat("float32")


def offers(request: Request | None = None, source: str = "small") -> Offers:
    load = load_source(f"tests.small_source:{source}")
    return Offers(lambda _: load, request or Request(0, 0), at)


def of_ranks(
    some: Offers, counts: Sequence[int], batch: int | None = None, machines: str = "h100"
) -> list[Offer]:
    return [some.of(Case(machines, count, batch or 2 * count)) for count in counts]


def test_offers_in_figures(tmp_path: Path) -> None:
    points = of_ranks(offers(Request(0, 0, tp=1, pp=1)), (8, 16, 32))
    for count, point in zip((8, 16, 32), points, strict=True):
        strategy, verdict = point.made
        row = point.row(Goal())
        assert (strategy.dp, strategy.tp, strategy.pp, verdict.ranks) == (count, 1, 1, count)
        assert row["samples_per_s"] == pytest.approx(2 * count / verdict.step_s)
        assert 0 < verdict.mfu < 1
        assert 700 * WAITING_POWER <= verdict.power_w <= 700
        assert row["samples_per_joule"] == pytest.approx(
            row["samples_per_s_per_rank"] / verdict.power_w
        )
    path = tmp_path / "points.csv"
    failed = offers().of(Case("h100", 8, 3, fixed={"dp": 2}))
    assert "does not divide" in str(failed.error)
    write_csv([point.row(Goal(1e6, 2.0)) for point in (failed, *points)], path)
    with path.open(newline="") as file:
        refused, *rows = csv.DictReader(file)
    assert "does not divide" in refused["error"]
    assert [int(row["ranks"]) for row in rows] == [8, 16, 32]
    assert all(float(row["price"]) == 2 * float(row["device_hours"]) for row in rows)


def test_each_plan_is_that_of_merakc_plan() -> None:
    source = load_source("tests.small_source:deep")
    (point,) = of_ranks(offers(source="deep"), (4,), 16)
    lowered, _ = plan_offline(source, Request(4, 0), 16, at("h100", 8))
    strategy, verdict = point.made
    assert lowered.prediction is not None
    assert strategy == lowered.plan.strategy
    assert verdict.step_s == pytest.approx(lowered.prediction.step_s, rel=1e-9)


def test_unlike_devices_draw_what_each_of_them_does(tmp_path: Path) -> None:
    path = tmp_path / "mixed.toml"
    path.write_text(
        'name = "mixed"\n'
        '[[nodes]]\ndevice = "h100"\ndevices = 8\n[[nodes]]\ndevice = "a100-40"\ndevices = 8\n'
        '[[links]]\nname = "wire"\ndevices = 16\nbytes_per_s = 1e11\n'
    )
    some = offers(Request(0, 0, tp=1, pp=1))
    ((_, found),) = (o.made for o in of_ranks(some, (16,), machines=str(path)))
    mean_w = (700 + 400) / 2
    assert mean_w * WAITING_POWER <= found.power_w <= mean_w
    slow = tmp_path / "slow.toml"
    slow.write_text(path.read_text().replace("h100", "a100-40"))
    ((_, alike),) = (o.made for o in of_ranks(some, (16,), machines=str(slow)))
    assert found.step_s == pytest.approx(alike.step_s)
    assert found.mfu == pytest.approx(alike.mfu * 2 * 19.5 / (19.5 + 67))


class Known(Offers):
    """Plans fit `least` devices and more, and use more of them the larger the batch is."""

    least, most, stops_at = 6, 1.0, 0

    def of(self, case: Case) -> Offer:
        """Without planning anything."""
        if case.batch_size == self.stops_at:
            raise KeyboardInterrupt
        mfu = min(case.batch_size / (case.batch_size + 32), self.most)
        step = replace(
            STEP, step_s=1.0, peak_bytes=case.ranks < self.least, memory_bytes=0, ranks=1,
            model_flops=round(1e6 * mfu), peak_flops_per_s=1e6,
        )  # fmt: skip
        return Offer(case, Strategy(), step)

    def _may_fit(self, case: Case) -> bool:
        return case.ranks >= self.least - 1  # by pieces, which may be wrong


@pytest.mark.parametrize(
    ("least", "fixed", "found"),
    [(1, {}, 1), (2, {}, 2), (6, {}, 6), (90, {}, 96), (6, {"tp": 3}, 6), (90, {"pp": 2}, 96)],
)
def test_the_fewest_devices_are_found_in_whole_nodes(
    least: int, fixed: dict[str, int], found: int
) -> None:
    some = Known(lambda _: load_source("tests.small_source:small"), Request(0, 0), at)
    some.least = least
    assert some.fewest(Case("h100", 0, 16, fixed=fixed)).case.ranks == found


def test_a_job_that_fits_no_number_of_devices_says_what_it_needs(tmp_path: Path) -> None:
    path = tmp_path / "tiny.toml"
    path.write_text(
        'name = "tiny"\n[[nodes]]\ndevice = "tiny"\ndevices = 2\n[devices.tiny]\n'
        "peak_flops_per_s = {float32 = 1e12}\nbytes_per_s = 1e11\nmemory_bytes = 200\n"
        '[[links]]\nname = "wire"\ndevices = 2\nbytes_per_s = 1e10\n'
    )
    found = offers().fewest(Case(str(path), 0, 16))
    assert found.case.ranks == 2  # all that there are
    assert "nothing fits the 200 B" in str(found.error)


def test_the_smallest_batch_that_keeps_a_share_of_the_flops() -> None:
    some = Known(lambda _: load_source("tests.small_source:small"), Request(0, 0), at)
    some.least = 1
    for first in (8, 32, 128):
        (offer,) = some.each([Case("h100", 2, first)], 0.5)
        assert offer.case.batch_size == 32
    (offer,) = some.each([Case("h100", 2, 7)], 0.1)
    assert offer.case.batch_size == 7  # not halved
    (offer,) = some.each([Case("h100", 2, 1)], 0.9999999)
    assert offer.case.batch_size == 1 << DOUBLINGS
    some.most = 0.75  # which larger batches do not surpass
    (offer,) = some.each([Case("h100", 2, 1)], 0.9999999)
    assert offer.made[1].mfu == pytest.approx(0.75)
    assert offer.case.batch_size < 1 << DOUBLINGS
    some.stops_at = 16
    (offer,) = some.each([Case("h100", 2, 4)], 0.5)
    assert offer.case.batch_size == 8  # and not that which Ctrl-C has ended
    assert some.stopped


def test_neighbours_and_what_is_best() -> None:
    case = Case("h100", 8, 16, fixed={"tp": 2, "pp": 1})
    near = [one.fixed for one in neighbours(case)]
    assert near == [{"tp": 1, "pp": 1}, {"tp": 4, "pp": 1}, {"tp": 2, "pp": 2}]
    points = of_ranks(offers(Request(0, 0, tp=1, pp=1)), (8, 16), 64)
    best = distinctions(points, [1.0, 100.0])
    assert "cheapest" in best[0]
    named = distinctions(points, [0.0, 0.0]).values()
    assert any("fewest device-hours" in names for names in named)
    assert distinctions(points[:1], [1.0]) == {}
