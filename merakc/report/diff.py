"""What two plans decide differently."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from merakc.files.printable import count_of
from merakc.ir.plan import Plan
from merakc.ir.plan_file import PlanFile
from merakc.machines.cluster import Cluster
from merakc.report.units import format_bytes, format_seconds, name_pattern

# What follows from the decisions, or is told by others.
SKIPPED = {"graph", "stages"}
PARAMETERS, ORDER = "parameters", "order"
MACHINES = "machines"  # whose figures some orders go by: where one plan has none, others tell
# What users give in place of what plans hold.
TOLD_AS = {"batch_size": "total_batch_size"}
# Of an order of work the first actions of the first ranks are shown.
ACTIONS, RANKS = 4, 2
MOST_ALIKE = 2  # neighbors that are told one by one


@dataclass(frozen=True, slots=True)
class Change:
    """One thing that differs: what, and how it is in each of the two."""

    what: str
    first: str
    second: str


def plan_changes(first: Plan, second: Plan, *, brief: bool = False) -> list[Change]:
    """Every decision in which two plans differ; empty where they train alike.

    Parameters appear as patterns in which `*` stands for a layer's index; `brief`, those that are
    on other stages are counted, lists of them are patterns too, orders only begin, and machines
    that only one of them goes by are left out. The batch is that of all dp ranks.
    """
    found: list[Change] = []
    if first.graph.hash != second.graph.hash:
        pairs = first.graph.hash[:12], second.graph.hash[:12]
        found.append(Change("graph", *pairs))
    for field in dataclasses.fields(Plan):
        if field.name in SKIPPED:
            continue
        name = TOLD_AS.get(field.name, field.name)
        old, new = getattr(first, name), getattr(second, name)
        if old == new:
            continue
        if brief and field.name == PARAMETERS:
            moved = sum(old.get(n) != new.get(n) for n in dict.fromkeys([*old, *new]))
            found.append(Change(field.name, "", f"{moved} on other stages"))
        elif brief and field.name == ORDER:
            found.append(Change(field.name, _begun(old), _begun(new)))
        elif isinstance(old, Cluster) and isinstance(new, Cluster):
            found += _mapping_changes(field.name, _figures(old), _figures(new))
        elif isinstance(old, Mapping):
            found += _mapping_changes(field.name, old, new)
        elif brief and _are_parameters((old, new), first, second):
            named = (dict.fromkeys(names or (), "named") for names in (old, new))
            found += _mapping_changes(field.name, *named)
        else:
            found.append(Change(name, _shown(old), _shown(new)))
    found += _stage_changes(first, second)
    told = found if not brief else [change for change in found if change.what != MACHINES]
    return told or found


def prediction_changes(first: PlanFile, second: PlanFile) -> list[Change]:
    """The predictions of two plans side by side, where both have one."""
    old, new = first.prediction, second.prediction
    if old is None or new is None:
        return []
    step = f"{format_seconds(new.step_s)} ({new.step_s / old.step_s - 1:+.1%})"
    peaks = [max(p.peak_bytes, default=0) for p in (old, new)]
    made_for = [plan.report.machines if plan.report else "" for plan in (first, second)]
    peak = f"{format_bytes(peaks[1])} ({peaks[1] / max(peaks[0], 1) - 1:+.1%})"
    return [
        *([Change("made for", *made_for)] if all(made_for) and made_for[0] != made_for[1] else []),
        Change("step", format_seconds(old.step_s), step),
        Change("idle", f"{old.bubble_share:.1%}", f"{new.bubble_share:.1%}"),
        Change("peak of a rank", format_bytes(peaks[0]), peak),
    ]


def changes_table(changes: list[Change], first: str, second: str) -> Table:
    """The changes for `rich` to print, the two plans under these names."""
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("", first, second):
        table.add_column(Text(name), overflow="fold")
    for change in changes:
        table.add_row(*(Text(cell) for cell in (change.what, change.first, change.second)))
    return table


def _figures(machines: Cluster) -> dict[str, Any]:
    """Everything that is said of machines, by dotted names."""
    waiting: list[tuple[str, Any]] = [("", dataclasses.asdict(machines))]
    found: dict[str, Any] = {}
    while waiting:
        name, value = waiting.pop()
        if isinstance(value, dict):
            waiting += [(f"{name}.{key}".strip("."), own) for key, own in value.items()]
        else:
            found[name] = value
    return found


def _shown(value: Any) -> str:
    if isinstance(value, Cluster):
        return value.name
    if isinstance(value, tuple):
        runs = [(str(item), len([*same])) for item, same in groupby(value)]
        return (
            "; ".join(f"{t} ({n} times)" if n > MOST_ALIKE else "; ".join([t] * n) for t, n in runs)
            or "-"
        )
    return "-" if value is None else str(value)


def _are_parameters(lists: Sequence[Any], *plans: Plan) -> bool:
    """Whether these are lists of parameters' names."""
    known = {name for plan in plans for name in plan.parameters}
    names = [name for own in lists for name in (own if isinstance(own, tuple) else ())]
    return bool(names) and all(isinstance(name, str) and name in known for name in names)


def _begun(order: Any) -> str:
    """The beginning of an order of work, of which each rank's actions are a text."""
    ranks = [str(own).split() for own in order or ()]
    told = [
        f"{' '.join(own[:ACTIONS])} .. ({count_of(len(own), 'action')})"
        if len(own) > ACTIONS
        else " ".join(own)
        for own in ranks[:RANKS]
    ]
    if len(ranks) > RANKS:
        told.append(f".. ({len(ranks)} ranks)")
    return "; ".join(told) or "-"


def _mapping_changes(
    field: str, old: Mapping[str, Any], new: Mapping[str, Any]
) -> Iterator[Change]:
    """The changed entries, those of one pattern and one change once."""
    counts: dict[tuple[str, str, str], int] = {}
    for name in dict.fromkeys([*old, *new]):
        if old.get(name) != new.get(name):
            key = name_pattern(name), _shown(old.get(name)), _shown(new.get(name))
            counts[key] = counts.get(key, 0) + 1
    for (pattern, before, after), count in counts.items():
        times = f" ({count})" if count > 1 else ""
        yield Change(f"{field}: {pattern}{times}", before, after)


def _stage_changes(first: Plan, second: Plan) -> Iterator[Change]:
    """The stages whose modules differ, where both plans have as many."""
    if len(first.rank_of) != len(second.rank_of) or first.graph.hash != second.graph.hash:
        return
    for stage in range(len(first.rank_of)):
        old, new = (
            "; ".join(
                f"{r.first_module or '(model)'} .. {r.last_module or '(model)'}"
                for r in plan.stages
                if r.stage == stage
            )
            for plan in (first, second)
        )
        if old != new:
            yield Change(f"stage {stage}", old, new)
