"""How quantities and names are written for people."""

from __future__ import annotations

import re
from itertools import pairwise
from math import inf

LONGEST_IN_S = 600.0
LONG = (("d", 86_400.0), ("h", 3_600.0), ("min", 60.0), ("s", 1.0))
_LAYER_INDEX = re.compile(r"(?:(?<=\.)|^)\d+(?=\.|$)")


def format_bytes(size_bytes: float) -> str:
    """1536 -> "1.50 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size_bytes) < 1024:
            return f"{size_bytes:.0f} B" if unit == "B" else f"{size_bytes:.2f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.2f} TiB"


def bytes_unit(size_bytes: float) -> tuple[str, float]:
    """The unit in which a size reads as a number of 1 or more, and what one byte is of it."""
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if abs(size_bytes) >= 1024**power:
            return unit, 1024.0**-power
    return "B", 1.0


def format_seconds(time_s: float) -> str:
    """0.0015 -> "1.50 ms", 45240 -> "12 h 34 min"; from ten minutes on in two units."""
    for (large, size_s), (small, part_s) in pairwise(LONG):
        if (LONGEST_IN_S if small == "s" else size_s) <= abs(time_s) < inf:
            whole, rest = divmod(round(time_s / part_s), round(size_s / part_s))
            return f"{whole:,} {large} {rest} {small}"
    for unit, per_second in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if abs(time_s) * per_second >= 1:
            return f"{time_s * per_second:.2f} {unit}"
    return f"{time_s * 1e6:.2f} us"


def format_count(number: float) -> str:
    """1234567 -> "1.23 M", three digits."""
    for unit, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(number) >= size:
            return f"{_three_digits(number / size)} {unit}"
    return _three_digits(number)


def _three_digits(number: float) -> str:
    places = 2 if abs(number) < 10 else 1 if abs(number) < 100 else 0
    return f"{number:.{places}f}"


def name_pattern(name: str) -> str:
    """`layers.3.mlp.weight` -> `layers.*.mlp.weight`."""
    return _LAYER_INDEX.sub("*", name)
