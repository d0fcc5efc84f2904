from __future__ import annotations

import pytest

from benchmarks.emulated import Cell, measure


@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_emulated_runs_take_at_least_the_simulated_time(name: str) -> None:
    cell = measure(name, 2, 4, 0.01, 2)
    assert len(cell.runs_s) == 2
    least_s = 0.01 * {"1f1b": 15.0, "zb-v": 12.5}[name]
    # Sleeps are never shorter; how much longer they are is a matter of the machine.
    assert cell.simulated_s >= least_s
    assert min(cell.runs_s) >= least_s
    assert cell.error < 2


def test_the_median_counts() -> None:
    cell = Cell("1f1b", 2, 4, 1.0, (1.5, 1.01, 0.99, 1.02, 4.0))
    assert cell.measured_s == 1.02
    assert cell.error == pytest.approx(0.02)
