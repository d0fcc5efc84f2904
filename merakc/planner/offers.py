"""What machines offer a job: the best plan on so many devices, for so large a batch, and so on."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from merakc.errors import ClusterError, MerakError
from merakc.files.printable import count_of
from merakc.ir.report import Verdict
from merakc.ir.state import UNSHARDED
from merakc.ir.strategy import Strategy
from merakc.machines.cluster import Cluster
from merakc.planner.choose import state_precision
from merakc.planner.fit import find_least
from merakc.planner.offline import Recordings, plan_recorded
from merakc.planner.piece_table import PieceTable
from merakc.planner.request import Request, check_request
from merakc.planner.sources.source import Source
from merakc.report.analysis import make_report
from merakc.report.yields import HOUR_S, Goal, yields

DEGREES = ("dp", "tp", "pp")
# Of numbers of devices the largest, and how many are tried between two powers of two; how often a
# batch is doubled.
MOST_DEVICES, STEPS, DOUBLINGS = 1 << 16, 8, 12
# How much more devices must compute with a batch that is doubled, and how often in a row they may
# not, until it is not doubled again.
BETTER, FLAT = 1.001, 2


@dataclass(frozen=True, slots=True)
class Case:
    """What a job is planned for: so many devices of the machines of a name, samples a step over all
    of them, tokens a text where that is not the source's own, and degrees that are fixed.
    """

    machines: str
    ranks: int
    batch_size: int
    sequence: int | None = None
    fixed: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        of = f", texts of {self.sequence:,} tokens" if self.sequence else ""
        degrees = "".join(f", {name}={value}" for name, value in self.fixed.items())
        devices = count_of(self.ranks, "device")
        return f"{devices} of {self.machines}, {count_of(self.batch_size, 'sample')}{of}{degrees}"


@dataclass(frozen=True, slots=True)
class Offer:
    """The best plan for a case, `merakc plan`'s, in figures; or the error that says why none is."""

    case: Case
    strategy: Strategy | None = None
    verdict: Verdict | None = None
    error: MerakError | None = None

    @property
    def made(self) -> tuple[Strategy, Verdict]:
        """The plan, where there is one."""
        assert self.strategy is not None
        assert self.verdict is not None
        return self.strategy, self.verdict

    @property
    def shards(self) -> str:
        """Those of parameters, gradients and optimizer state, in words."""
        return "; ".join(dict.fromkeys(map(str, self.made[0].state_shards or (UNSHARDED,))))

    def row(self, goal: Goal) -> dict[str, Any]:
        """All figures, by name; None where there is no plan."""
        case = self.case
        found: dict[str, Any] = {
            "machines": case.machines, "ranks": case.ranks, "batch_size": case.batch_size,
            "sequence": case.sequence, "error": str(self.error or ""),
        }  # fmt: skip
        if self.verdict is None:
            return found
        strategy, verdict = self.made
        rate, (_, name) = verdict.items_per_s / verdict.ranks, verdict.items
        found |= {axis: getattr(strategy, axis) for axis in DEGREES}
        found |= {
            "layout": str(strategy), "shards": self.shards, "recompute": strategy.recompute,
            "offload": strategy.offload, "step_s": verdict.step_s, "mfu": verdict.mfu,
            "peak_bytes": verdict.peak_bytes, "memory_bytes": verdict.memory_bytes,
            "reserved_bytes": verdict.reserved_bytes, "waiting_share": verdict.waiting_share,
            "power_w": verdict.power_w, f"{name}_per_s": verdict.items_per_s,
            f"{name}_per_s_per_rank": rate, f"{name}_per_rank_hour": rate * HOUR_S,
            f"{name}_per_joule": rate / verdict.power_w if verdict.power_w else 0.0,
        }  # fmt: skip
        return found | yields(verdict, goal)


class Offers:
    """Plans for cases of one job. What was recorded and priced for one serves the next.

    `load` gives the model for texts of so many tokens, `machines` so many devices of a name;
    `request` holds what is fixed in all cases. `progress` is told what is being done.
    """

    def __init__(
        self,
        load: Callable[[int | None], Source],
        request: Request,
        machines: Callable[[str, int], Cluster],
        progress: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.load, self.request, self.machines, self.progress = load, request, machines, progress
        self.place = ""  # of the case among several
        self.stopped = False  # by Ctrl-C, with cases left
        self.recordings: dict[int | None, Recordings] = {}
        self.tables: dict[int | None, PieceTable] = {}

    def of(self, case: Case) -> Offer:
        """The best plan for a case."""
        try:
            request, cluster, table = self._asked(case)
            self._tell(f"comparing layouts of {case}")
            record = self.recordings[case.sequence]
            lowered, _ = plan_recorded(record, request, case.batch_size, cluster, table)
        except MerakError as error:
            return Offer(case, error=error)
        return Offer(case, lowered.plan.strategy, make_report(lowered, cluster).verdict)

    def each(self, cases: Sequence[Case], mfu: float | None = None) -> list[Offer]:
        """Those for several cases, up to Ctrl-C, if there was one before it. A case of 0 devices is
        one of the fewest; where an `mfu` is to be kept, the batch is the smallest that does.
        """
        found: list[Offer] = []
        for number, case in enumerate(cases, 1):
            self.place = f"{number} of {len(cases)}: "
            try:
                found.append(self.of(case) if case.ranks else self.fewest(case))
                for offer in () if mfu is None else self.keeping_mfu(found[-1], mfu):
                    found[-1] = offer
            except KeyboardInterrupt:
                if not found:
                    raise
                self.stopped = True
                break
        return found

    def fewest(self, case: Case) -> Offer:
        """The offer of the fewest devices that its plan fits, of powers of two, times the degrees
        that are fixed, and of `STEPS` numbers, whole nodes, between the last two of them; where
        none does, that of all there are.
        """
        count: int = math.prod(case.fixed.values())
        offer = self._fitting(replace(case, ranks=count))
        while offer is None and 2 * count <= MOST_DEVICES and self._has(case.machines, 2 * count):
            count *= 2
            offer = self._fitting(replace(case, ranks=count))
        if offer is None:
            return self.of(replace(case, ranks=count))
        fewer = (self._fitting(replace(case, ranks=n)) for n in self._between(case, count))
        return next((one for one in fewer if one is not None), offer)

    def keeping_mfu(self, offer: Offer, mfu: float) -> Iterator[Offer]:
        """Offers, each better than the one before, up to that of the smallest batch that keeps a
        model FLOPs utilization: an offer's doubled and halved. Where none does, up to the batch
        from which on devices compute no more.
        """
        if keeps(offer, mfu):
            while offer.case.batch_size % 2 == 0:
                offer = self.of(replace(offer.case, batch_size=offer.case.batch_size // 2))
                if not keeps(offer, mfu):
                    return
                yield offer
            return
        flat = 0
        for _ in range(DOUBLINGS):
            larger = self.of(replace(offer.case, batch_size=2 * offer.case.batch_size))
            if larger.verdict is None:
                return
            flat = 0 if _is_used_better(larger, offer) else flat + 1
            offer = larger
            yield offer
            if keeps(offer, mfu) or flat == FLAT:
                return

    def _tell(self, text: str) -> None:
        self.progress(self.place + text)

    def _asked(self, case: Case) -> tuple[Request, Cluster, PieceTable]:
        """The request of a case, its machines, and the pieces of its model there."""
        request = replace(
            self.request, world_size=case.ranks, total_batch_size=case.batch_size, **case.fixed
        )
        check_request(request, case.batch_size)
        cluster = self.machines(case.machines, case.ranks)
        if case.sequence not in self.recordings:
            source = self.load(case.sequence)
            self.recordings[case.sequence] = Recordings(source, self.request, self._tell)
        known = self.tables.get(case.sequence)
        record = self.recordings[case.sequence]
        table = PieceTable(record, cluster) if known is None else known.on(cluster)
        self.tables[case.sequence] = table
        return request, cluster, table

    def _may_fit(self, case: Case) -> bool:
        """Whether some layout of a case fits, by the pieces of the model."""
        self._tell(f"looking whether {case} would do")
        try:
            request, cluster, table = self._asked(case)
            precision = state_precision(self.recordings[case.sequence], request)
            least = find_least(table, request, cluster.described(case.ranks), precision)
        except MerakError:
            return False
        return least is not None and least.fits

    def _fitting(self, case: Case) -> Offer | None:
        """The offer for a case; None where that does not fit."""
        offer = self.of(case) if self._may_fit(case) else None
        return offer if offer is not None and offer.verdict and offer.verdict.fits else None

    def _has(self, machines: str, ranks: int) -> bool:
        """Whether there are so many devices."""
        try:
            self.machines(machines, ranks)
        except ClusterError:
            return False
        return True

    def _between(self, case: Case, ranks: int) -> Iterator[int]:
        """Numbers of devices between the half of them and all, whole nodes from a node on."""
        half = ranks // 2
        node = self.machines(case.machines, ranks).described(ranks).nodes[0].devices
        unit = node if half >= node else 1
        step = -(-half // STEPS // unit) * unit or unit
        yield from range(half + step, ranks, step)


def keeps(offer: Offer, mfu: float) -> bool:
    """Whether an offer fits, and reaches a model FLOPs utilization."""
    found = offer.verdict
    return found is not None and found.fits and found.mfu >= mfu


def _is_used_better(larger: Offer, offer: Offer) -> bool:
    """Whether one of two batches fits better, or the same devices compute more with it."""
    found, before = larger.verdict, offer.verdict
    assert found is not None
    if before is None or found.fits != before.fits:
        return found.fits
    return found.mfu > BETTER * before.mfu


def neighbours(case: Case) -> list[Case]:
    """Cases that have one of the degrees halved or doubled that are fixed in this."""
    found = []
    for name, value in case.fixed.items():
        near = [value // 2] * (value % 2 == 0) + [2 * value]
        found += [replace(case, fixed={**case.fixed, name: other}) for other in near]
    return found


def distinctions(offers: Sequence[Offer], prices: Sequence[float]) -> dict[int, list[str]]:
    """Which of several offers that fit are best in what, by their places. `prices` are those of an
    hour of each one's devices, or 0.
    """
    fitting = {k: o.verdict for k, o in enumerate(offers) if o.verdict and o.verdict.fits}
    if len(fitting) < 2:
        return {}
    found: dict[int, list[str]] = {}
    energy = {k: v.ranks * v.power_w / v.items_per_s for k, v in fitting.items()}
    is_priced = all(prices[k] for k in fitting)
    hours = {k: v.ranks / v.items_per_s * (prices[k] if is_priced else 1.0)
             for k, v in fitting.items()}  # fmt: skip
    columns = {
        "fastest": {k: 1.0 / v.items_per_s for k, v in fitting.items()},
        "cheapest" if is_priced else "fewest device-hours": hours,
        "least energy": energy if all(energy.values()) else {},
    }
    for name, values in columns.items():
        if values:
            found.setdefault(min(values, key=lambda k: values[k]), []).append(name)
    return found


def write_csv(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """The rows, with a column for each name that any has."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)
