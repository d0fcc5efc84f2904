"""Cuts a program into pipeline stages: METIS proposes orders, an exact program cuts them.

Stages are intervals of a topological order, found exactly (`interval.py`); nodes beside the cuts
are then moved where that saves bytes. Program order is one candidate: on chains it is the best,
on towers, branches and encoder-decoders it is arbitrary, and METIS finds others (`metis.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise

from merakc.errors import CutError
from merakc.files.printable import count_of
from merakc.ir.report import CutReport
from merakc.passes.stages.interval import (
    SPEED_UNIT,
    Value,
    WeightedDag,
    cut_bytes,
    largest_load,
    least_bytes,
    least_largest_load,
    rooms,
)
from merakc.passes.stages.metis import Proposal, proposals

_WEIGHT_QUANTA = 1 << 50
"""Quanta of the whole program's seconds: sums stay exact in 64 bits."""
_REFINE_PASSES = 8
"""Passes of single-node moves; in practice the third finds nothing."""


@dataclass(frozen=True, slots=True)
class CutProblem:
    """A program as a weighted directed acyclic graph.

    `weights_s` holds the seconds of each node, in program order; `edges` (producer, consumer,
    size_bytes) with producer < consumer, the size being that of the producer's value and so equal
    on all its edges. Neighbours of equal `grain` stay in one stage. `prices` say what the value of
    a producer costs to send, in bytes, where that is not its size.
    """

    weights_s: tuple[float, ...]
    edges: tuple[tuple[int, int, int], ...]
    grain: tuple[int, ...] | None = None
    prices: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Candidate:
    """The stage of each node after refinement, what it costs, and the stages before."""

    stage: tuple[int, ...]
    load: int
    bytes: int
    repaired: tuple[int, ...]


def cut(
    problem: CutProblem,
    stages: int,
    *,
    tolerance: float = 0.03,
    seed: int = 0,
    speeds: Sequence[float] | None = None,
) -> tuple[tuple[int, ...], CutReport]:
    """The stage of each node and how it was found; no edge goes back, no stage is empty of work.

    First the load of the heaviest stage is made least, then the bytes between stages within
    `tolerance` (a share) of that: at 0 a cut would go through any tensor, however large, for a
    microsecond of balance. Bytes are those of each value once per (value, stage that reads it, its
    own left out), and count as their `prices` say; the report tells their sizes. Its METIS figures
    are of its best proposal after repair and before refinement; where the graph is too small for
    METIS they are the dynamic program's. A load is a stage's weight, over its speed where `speeds`
    are given, each above 0.

    Raises `CutError` if the graph has fewer nodes of positive weight than `stages`.
    """
    dag, atoms = _contract(problem)
    _check_stages(dag, stages, "grains" if problem.grain else "nodes")
    program_order = tuple(range(len(dag.weights)))
    by_program = Proposal(program_order, (0,) * len(program_order))
    rates = _rates(speeds, stages)
    by_metis = proposals(dag, stages, seed, rates)
    solved, bound = _solve_all(dag, rates, tolerance, [by_program, *by_metis])
    limit = min(c.load for c in solved.values()) * (1 + tolerance)

    def rank(proposal: Proposal) -> tuple[bool, int]:
        candidate = solved[proposal.order]
        return candidate.load > limit, candidate.bytes

    best_metis = min(by_metis, key=rank, default=by_program)
    winner = min(by_program, best_metis, key=rank)
    found, repaired = solved[winner.order], solved[best_metis.order].repaired
    even = max(sum(dag.weights), 1) / (sum(rates) / SPEED_UNIT)
    sent, _ = _contract(replace(problem, prices={}))
    report = CutReport(
        winner="dp" if winner is by_program else "metis",
        load=found.load / even,
        bound_load=bound / even,
        cut_bytes=cut_bytes(sent, found.stage),
        metis_load=largest_load(dag, repaired, stages, rates) / even,
        metis_cut_bytes=cut_bytes(sent, repaired),
        metis_moves=_moves(best_metis.parts, solved[best_metis.order].stage) if by_metis else 0,
    )
    return tuple(found.stage[atom] for atom in atoms), report


def _check_stages(dag: WeightedDag, stages: int, unit: str) -> None:
    """Raises `CutError` where there are too few nodes that take time, of this `unit`."""
    if not dag.weights:
        raise CutError(
            "the loss follows from no operation on parameters, so that there is nothing to train; "
            "return a loss of what the layers compute"
        )
    working = sum(weight > 0 for weight in dag.weights)
    most = max(working, 1)
    if not 1 <= stages <= most:
        raise CutError(
            f"cannot cut the graph into {count_of(stages, 'pipeline stage')}: {working} of its "
            f"{unit} take time, so it can give at most {most}; choose a pipeline degree from 1 to "
            "that"
        )


def _rates(speeds: Sequence[float] | None, stages: int) -> tuple[int, ...]:
    """The speeds in units of the slowest."""
    if speeds is None:
        return (SPEED_UNIT,) * stages
    assert len(speeds) == stages, f"{len(speeds)} speeds of {stages} stages"
    assert min(speeds) > 0, f"speeds {speeds} are above 0"
    return tuple(round(speed / min(speeds) * SPEED_UNIT) for speed in speeds)


def _solve_all(
    dag: WeightedDag, rates: Sequence[int], tolerance: float, tried: Sequence[Proposal]
) -> tuple[dict[tuple[int, ...], _Candidate], int]:
    """The best intervals of each order, refined, and the least largest load of the first order."""
    along = {proposal.order: dag.reordered(proposal.order) for proposal in tried}
    bounds = {
        order: least_largest_load(reordered.weights, len(rates), rates)
        for order, reordered in along.items()
    }
    cap = int(min(bounds.values()) * (1 + tolerance))
    solved = {
        order: _solve(dag, order, reordered, rates, max(cap, bounds[order]))
        for order, reordered in along.items()
    }
    return solved, bounds[tried[0].order]


def _solve(
    dag: WeightedDag,
    order: tuple[int, ...],
    reordered: WeightedDag,
    rates: Sequence[int],
    load: int,
) -> _Candidate:
    stages, repaired = len(rates), [0] * len(order)
    for node, own in zip(order, least_bytes(reordered, stages, load, rates), strict=True):
        repaired[node] = own
    stage = _refine(dag, repaired, rooms(stages, load, rates))
    most = largest_load(dag, stage, stages, rates)
    return _Candidate(tuple(stage), most, cut_bytes(dag, stage), tuple(repaired))


def _moves(parts: Sequence[int], stage: Sequence[int]) -> int:
    """The nodes that ended in a stage of which another METIS part makes up more."""
    shares = Counter(zip(stage, parts, strict=True))
    return len(stage) - sum(
        max(size for (own, _), size in shares.items() if own == kept) for kept in set(stage)
    )


def _contract(problem: CutProblem) -> tuple[WeightedDag, list[int]]:
    """The graph of grains with integer weights, and the grain that each node went to."""
    weights_s, edges = problem.weights_s, problem.edges
    assert all(0 <= w < float("inf") for w in weights_s), "weights are finite seconds"
    assert all(0 <= a < b < len(weights_s) for a, b, _ in edges), "edges run forward"
    marks = problem.grain or tuple(range(len(weights_s)))
    atoms = [0, *accumulate(int(a != b) for a, b in pairwise(marks))][: len(weights_s)]
    quantum_s = sum(weights_s) / _WEIGHT_QUANTA
    weights = [0] * (atoms[-1] + 1 if atoms else 0)
    for atom, weight_s in zip(atoms, weights_s, strict=True):
        weights[atom] += max(1, round(weight_s / quantum_s)) if weight_s > 0 else 0
    readers: dict[int, set[int]] = {}
    sizes: dict[int, int] = {}
    for producer, consumer, size_bytes in edges:
        assert sizes.setdefault(producer, size_bytes) == size_bytes, "one value, two sizes"
        if atoms[producer] != atoms[consumer]:
            readers.setdefault(producer, set()).add(atoms[consumer])
    values = tuple(
        Value(atoms[producer], tuple(sorted(read)), problem.prices.get(producer, sizes[producer]))
        for producer, read in sorted(readers.items())
    )
    return WeightedDag(tuple(weights), values), atoms


def _refine(dag: WeightedDag, stage: Sequence[int], room: Sequence[int]) -> list[int]:
    """Moves single nodes to the stage where they save most bytes, in their order and within the
    weight that each stage has room for.
    """
    moved = _Moves(dag, stage, room)
    for _ in range(_REFINE_PASSES):
        if not sum(moved.improve(node) for node in range(len(dag.weights))):
            break
    return moved.stage


class _Moves:
    """Stages under change, with the counts that price a move."""

    def __init__(self, dag: WeightedDag, stage: Sequence[int], room: Sequence[int]) -> None:
        self.stage = list(stage)
        self._weights = dag.weights
        self._room = list(room)
        self._working = [0] * len(room)
        for weight, own in zip(dag.weights, stage, strict=True):
            self._room[own] -= weight
            self._working[own] += weight > 0
        self._inputs: list[list[tuple[Value, Counter[int]]]] = [[] for _ in stage]
        self._outputs: list[list[tuple[Value, Counter[int]]]] = [[] for _ in stage]
        for value in dag.values:
            read = (value, Counter(self.stage[reader] for reader in value.readers))
            self._outputs[value.producer].append(read)
            for reader in value.readers:
                self._inputs[reader].append(read)

    def improve(self, node: int) -> bool:
        """Makes the best legal move of `node`; False where none saves bytes."""
        own, weight = self.stage[node], self._weights[node]
        if weight and self._working[own] == 1:
            return False
        low = max((self.stage[v.producer] for v, _ in self._inputs[node]), default=0)
        high = min(
            (self.stage[r] for v, _ in self._outputs[node] for r in v.readers),
            default=len(self._room) - 1,
        )
        saved, target = max(
            (
                (self._saved_bytes(node, to), -to)
                for to in range(low, high + 1)
                if to != own and weight <= self._room[to]
            ),
            default=(0, 0),
        )
        if saved > 0:
            self._move(node, -target)
        return saved > 0

    def _saved_bytes(self, node: int, to: int) -> int:
        own, saved = self.stage[node], 0
        for value, read in self._inputs[node]:
            source = self.stage[value.producer]
            saved += value.size_bytes * (read[own] == 1 and own != source)
            saved -= value.size_bytes * (read[to] == 0 and to != source)
        for value, read in self._outputs[node]:
            saved += value.size_bytes * ((read[to] > 0) - (read[own] > 0))
        return saved

    def _move(self, node: int, to: int) -> None:
        own, weight = self.stage[node], self._weights[node]
        self.stage[node] = to
        self._room[own] += weight
        self._room[to] -= weight
        self._working[own] -= weight > 0
        self._working[to] += weight > 0
        for _, read in self._inputs[node]:
            read[own] -= 1
            read[to] += 1
