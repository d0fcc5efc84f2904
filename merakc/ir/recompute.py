"""What a stage keeps for its backward, block by block, and how plans write it.

`3 kept, 8 x 2 again, 5 x 1 products`: three blocks keep all; then sixteen are made again, two at a
time; the last five keep what products make of them, and make the rest again, block by block.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby

# The kinds of recomputation of a plan that are inside of its backwards; others are actions.
IN_BACKWARD = ("full", "selective", "budget")
MOST_RUNS = 50_000  # that a text may tell of: plans come from files of others
_RUN = re.compile(r"(?:([1-9]\d*) x )?([1-9]\d*) (kept|products|again)")
_UNITS = {
    f"{prefix}{unit}b": base**power
    for unit, base in (("", 1000), ("i", 1024))
    for power, prefix in enumerate("kmgt", 1)
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([kmgt]i?b)", re.IGNORECASE)
# What the names of nodes that a backward makes again begin with, before the number of their run.
_AGAIN = re.compile(r"again(\d+):")


class Keep(StrEnum):
    """What a block keeps from its forward to its backward: all that its backward reads, what
    expensive calls have made, or what it reads of blocks before it.
    """

    KEPT = "kept"
    PRODUCTS = "products"
    AGAIN = "again"


@dataclass(frozen=True, slots=True)
class Run:
    """Blocks that follow each other, of which the backward makes again together what they do not
    keep, right before it is read.
    """

    keep: Keep
    blocks: int


def parse_runs(text: str) -> tuple[Run, ...]:
    """The runs that a text tells of; raises `ValueError` for what is none."""
    found: list[Run] = []
    for part in text.split(", "):
        match = _RUN.fullmatch(part)
        if match is None:
            raise ValueError(
                f"{part!r} is not written like '2 x 3 again', '1 products' or '4 kept'"
            )
        count, blocks, keep = match.groups()
        if len(count or "") > 5 or len(blocks) > 9 or len(found) + int(count or 1) > MOST_RUNS:
            raise ValueError(f"{part!r} makes more than {MOST_RUNS:,} runs of blocks")
        found += [Run(Keep(keep), int(blocks))] * int(count or 1)
    return tuple(found)


def format_runs(runs: Sequence[Run]) -> str:
    """The text of runs."""
    parts = []
    for run, equal in groupby(runs):
        count = len(list(equal))
        parts.append(f"{count} x " * (count > 1) + f"{run.blocks} {run.keep}")
    return ", ".join(parts)


def again_name(run: int, name: str) -> str:
    """The name in a backward of a node of the forward that it repeats for this run of blocks."""
    return f"again{run}:{name}"


def run_of(name: str) -> int | None:
    """The run of blocks for which a backward repeats the node of this name; of others None."""
    match = _AGAIN.match(name)
    return int(match[1]) if match else None


@dataclass(frozen=True, slots=True)
class Budget:
    """What a rank may hold at its highest point: bytes in all, or a share of what it holds beside
    its state where nothing is made again.
    """

    size_bytes: int | None = None
    share: float = 1.0

    def __str__(self) -> str:
        if self.size_bytes is not None:
            return "the budget"
        return f"the budget of {self.share:g} of what it holds beside its state"


def parse_budget(text: str) -> Budget | None:
    """The budget that a text such as "40 GiB", "512 MB" or "0.5" tells of; None of other texts."""
    match = _SIZE.fullmatch(text.strip())
    if match is not None and float(match[1]) > 0:
        return Budget(round(float(match[1]) * _UNITS[match[2].lower()]))
    try:
        share = float(text)
    except ValueError:
        return None
    return Budget(share=share) if 0 <= share <= 1 else None
