"""What plans yield."""

from __future__ import annotations

from dataclasses import replace

import pytest

from merakc.errors import ConfigError
from merakc.report.yields import Goal, parse_count, yields, yields_line
from tests.ir.test_report import STEP


def test_numbers_of_tokens_are_read() -> None:
    read = [parse_count(text) for text in ("3e11", "300B", "1.5T", "2 m", "7")]
    assert read == [3e11, 3e11, 1.5e12, 2e6, 7]
    for text in ("", "many", "3X", "-1", "nan", "1e999"):
        with pytest.raises(ConfigError, match=r"such as 3e11, 300B or 1\.5T"):
            parse_count(text)
    for given in ((-1.0, 0.0), (1.0, float("inf")), (float("nan"), 0.0)):
        with pytest.raises(ConfigError, match="give a number above 0"):
            Goal(*given)


def test_a_training_in_days_energy_and_price() -> None:
    step = replace(STEP, step_s=2.0, tokens=4_000_000, ranks=64, power_w=600.0)
    found = yields(step, Goal(1.728e12, price_per_hour=2.5))
    assert found == pytest.approx(
        {
            "tokens_per_day": 1.728e11, "days": 10, "device_hours": 64 * 240,
            "energy_kwh": 0.6 * 64 * 240, "price": 2.5 * 64 * 240,
        }
    )  # fmt: skip
    told = yields_line(step, Goal(1.728e12, 2.5))
    assert told == (
        "173 G tokens a day; 1.73 T tokens: 10.0 days, 15.4 k device-hours, "
        "9.22 k kWh of the devices, 38.4 k to pay"
    )
    assert yields_line(step, Goal(1.728e9)).endswith(
        ": 0.01 days, 15.4 device-hours, 9.2 kWh of the devices"
    )
    assert yields_line(step, Goal()) == "173 G tokens a day"


def test_what_is_not_known_is_left_out() -> None:
    samples = replace(STEP, step_s=1.0, tokens=0, samples=10, power_w=0.0)
    found = yields(samples, Goal(864_000))
    assert found == pytest.approx(
        {"samples_per_day": 864_000, "days": 1, "device_hours": 24 * samples.ranks}
    )
    assert yields(replace(STEP, step_s=0.0), Goal(1.0)) == {}
    assert yields_line(replace(STEP, step_s=0.0), Goal()) == ""
