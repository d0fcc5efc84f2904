"""What a plan yields: tokens a day, and what a whole training of it takes and costs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from merakc.errors import ConfigError
from merakc.ir.report import Verdict
from merakc.report.units import format_count

DAY_S, HOUR_S, JOULES_PER_KWH = 86_400.0, 3_600.0, 3.6e6
WORDS = {
    "days": "days", "device hours": "device-hours", "kWh": "kWh of the devices", "price": "to pay",
}  # fmt: skip
_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12, "p": 1e15}


@dataclass(frozen=True, slots=True)
class Goal:
    """How much a training sees in all, tokens or the samples of a batch without any, and what an
    hour of a device costs, in any currency. 0 where nobody has said.
    """

    items: float = 0.0
    price_per_hour: float = 0.0

    def __post_init__(self) -> None:
        for name, value in (("--tokens", self.items), ("--price", self.price_per_hour)):
            if not 0 <= value < float("inf"):
                raise ConfigError(f"{name} {value}: give a number above 0")


def parse_count(text: str) -> float:
    """`300B` -> 3e11; k, M, B or G, T and P are known. Raises `ConfigError` for anything else."""
    found = re.fullmatch(r"(\d+(?:\.\d*)?(?:e\d{1,2})?) ?([a-z]?)", text.strip().lower())
    if found is None or found[2] not in _UNITS:
        raise ConfigError(f"{text!r} is no number of tokens; give one such as 3e11, 300B or 1.5T")
    return float(found[1]) * _UNITS[found[2]]


def yields(found: Verdict, goal: Goal) -> dict[str, float]:
    """What is known, by name: `tokens_per_day` (or samples) of all devices; of a goal, `days`,
    `device_hours`, `energy_kwh` (what the devices draw, without hosts, network and cooling) and
    `price`.
    """
    if not found.step_s:
        return {}
    figures = {f"{found.items[1]}_per_day": DAY_S * found.items_per_s}
    if goal.items:
        took_s = goal.items / found.items_per_s
        figures["days"] = took_s / DAY_S
        figures["device_hours"] = found.ranks * took_s / HOUR_S
        if found.power_w:
            figures["energy_kwh"] = found.ranks * found.power_w * took_s / JOULES_PER_KWH
        if goal.price_per_hour:
            figures["price"] = goal.price_per_hour * figures["device_hours"]
    return figures


def yields_line(found: Verdict, goal: Goal) -> str:
    """The same in words; "" where nothing is known."""
    figures = yields(found, goal)
    if not figures:
        return ""
    name = found.items[1]
    told = f"{format_count(figures.pop(f'{name}_per_day'))} {name} a day"
    if figures:
        took = shown_yields(figures)
        told += f"; {format_count(goal.items)} {name}: "
        told += ", ".join(f"{took[key]} {word}" for key, word in WORDS.items() if key in took)
    return told


def format_yield(value: float) -> str:
    """Numbers from 1,000 on have three digits and a letter, those below 0.1 two digits."""
    return (
        format_count(value) if value >= 1000 else f"{value:.2g}" if value < 0.1 else f"{value:.1f}"
    )


def shown_yields(figures: Mapping[str, float]) -> dict[str, str]:
    """Each figure by its name in words."""
    names = {name: name.replace("energy_kwh", "kWh").replace("_", " ") for name in figures}
    return {names[name]: format_yield(value) for name, value in figures.items()}
