"""Topological orders that METIS proposes for a program.

METIS (Karypis and Kumar, "A fast and high quality multilevel scheme for partitioning irregular
graphs", 1998) partitions undirected graphs: its parts are often cyclic as stages and it knows
nothing of order. What is kept of them is an order of the program in which they lie, as far as its
edges allow, one after the other.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np
import pymetis

from merakc.passes.stages.interval import Value, WeightedDag

_BLOCKS_PER_STAGE = 8
"""METIS sees blocks of about this share of a stage: on single nodes its cuts fray."""
_LEAST_BLOCKS_PER_PART = 2
"""With fewer vertices a part METIS complains on the process's standard output."""
_METIS_TOTAL = 1 << 28
"""Sum of METIS's integer weights, which are 32 bits wide."""
_PROPOSALS = ((0, 30), (1, 100))
"""(seed offset, ufactor) of the block partitions: 3 % and 10 % of imbalance allowed; more pairs
found nothing better on 400 random graphs."""
_BRANCHES = (2, 3)
"""Clusters to look for beside one per stage: as many as the usual towers, or encoder and decoder,
part them whole."""
_FINE_UFACTOR = 100
"""Clusters that only give an order need not be balanced."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """A topological order, and the METIS part of each node that it comes from."""

    order: tuple[int, ...]
    parts: tuple[int, ...]


def proposals(
    dag: WeightedDag, stages: int, seed: int, speeds: Sequence[int] | None = None
) -> list[Proposal]:
    """Different topological orders for `stages` intervals; none where the graph is too small.

    Clusters of the fine graph give orders that follow one branch before the next; blocks along
    these and along program order, partitioned into stages, give further ones. METIS is told how
    large parts are to be where `speeds` differ, and not in which order.
    """
    count = len(dag.weights)
    if stages == 1 or count < _LEAST_BLOCKS_PER_PART * stages:
        return []
    dag = _lightened(dag, stages)
    shares = [s / sum(speeds) for s in speeds] if speeds and len(set(speeds)) > 1 else None
    found: dict[tuple[int, ...], tuple[int, ...]] = {}
    for clusters in sorted({*_BRANCHES, stages}):
        if count < _LEAST_BLOCKS_PER_PART * clusters:
            continue
        parts = _partition(dag, clusters, seed, _FINE_UFACTOR, in_order=False)
        ranked = _ranked(dag, parts)
        found.setdefault(_order_of(dag, ranked), tuple(ranked))
    for base in (tuple(range(count)), *found):
        renumbered = dag.reordered(base)
        block = _blocks(renumbered, _BLOCKS_PER_STAGE * stages)
        blocks = _merge(renumbered, block)
        if len(blocks.weights) < _LEAST_BLOCKS_PER_PART * stages:
            continue
        for offset, ufactor in _PROPOSALS:
            parts = _partition(blocks, stages, seed + offset, ufactor, shares, in_order=True)
            raw = _ranked(renumbered, [parts[own] for own in block])
            order = tuple(base[place] for place in _order_of(renumbered, raw))
            by_node = sorted(zip(base, raw, strict=True))
            found.setdefault(order, tuple(own for _, own in by_node))
    return [Proposal(order, parts) for order, parts in found.items()]


def _lightened(dag: WeightedDag, stages: int) -> WeightedDag:
    """The graph with no node heavier than an even share of a stage.

    A node that outweighs a stage fills one whatever is done, and METIS cannot balance around it.
    """
    rest = sum(dag.weights)
    share = rest
    for left, weight in zip(range(stages, 0, -1), sorted(dag.weights, reverse=True), strict=False):
        share = rest // left
        if weight <= share:
            break
        rest -= weight
    return replace(dag, weights=tuple(min(weight, share) for weight in dag.weights))


def _blocks(dag: WeightedDag, count: int) -> list[int]:
    """The block of each node: intervals of about equal weight, cut where little is alive."""
    prefix = np.concatenate(([0], np.cumsum(np.array(dag.weights, dtype=np.int64))))
    halves = prefix[-1] * (np.arange(1, 2 * count, 2) / (2 * count))
    ends = np.searchsorted(prefix, halves)
    live = dag.crossing_bytes()
    marks = np.zeros(len(dag.weights) + 1, dtype=np.int64)
    for low, high in pairwise(ends.tolist()):
        if low < high:
            marks[low + int(live[low:high].argmin())] = 1
    marks[0] = 0
    return [int(block) for block in np.cumsum(marks[:-1])]


def _merge(dag: WeightedDag, block: Sequence[int]) -> WeightedDag:
    """The graph of blocks, which are numbered along the order."""
    weights = [0] * (block[-1] + 1)
    for own, weight in zip(block, dag.weights, strict=True):
        weights[own] += weight
    values = []
    for value in dag.values:
        own = block[value.producer]
        if readers := sorted({block[r] for r in value.readers} - {own}):
            values.append(Value(own, tuple(readers), value.size_bytes))
    return WeightedDag(tuple(weights), tuple(values))


def _partition(
    dag: WeightedDag,
    parts: int,
    seed: int,
    ufactor: int,
    shares: Sequence[float] | None = None,
    *,
    in_order: bool,
) -> list[int]:
    """METIS's part of each node; `shares` are the weights that the parts are to have, of 1.

    METIS pays for every cut edge, while a value costs its size once per stage that reads it.
    `in_order` joins producer and readers by a path, of which monotone stages cut exactly that
    many edges; otherwise a star shares the size between the readers.
    """
    edges: Counter[tuple[int, int]] = Counter()
    for value in dag.values:
        ends = value.readers
        starts = (value.producer, *ends) if in_order else (value.producer,) * len(ends)
        share = value.size_bytes if in_order else value.size_bytes // len(ends)
        for start, end in zip(starts, ends, strict=False):
            edges[start, end] += share
    neighbours: list[list[tuple[int, int]]] = [[] for _ in dag.weights]
    heaviest = max(sum(edges.values()), 1)
    for (start, end), size_bytes in edges.items():
        weight = 1 + size_bytes * _METIS_TOTAL // heaviest
        neighbours[start].append((end, weight))
        neighbours[end].append((start, weight))
    total = max(sum(dag.weights), 1)
    found = pymetis.part_graph(
        parts,
        pymetis.CSRAdjacency(
            [0, *accumulate(len(near) for near in neighbours)],
            [node for near in neighbours for node, _ in near],
        ),
        eweights=[weight for near in neighbours for _, weight in near],
        vweights=[1 + weight * _METIS_TOTAL // total for weight in dag.weights],
        tpwgts=shares,
        options=pymetis.Options(seed=seed, ufactor=ufactor),
    )
    return list(found.vertex_part)


def _ranked(dag: WeightedDag, parts: Sequence[int]) -> list[int]:
    """`parts` renumbered along the quotient graph, depth first; cycles broken by mean position."""
    places: dict[int, list[int]] = {}
    for node, part in enumerate(parts):
        places.setdefault(part, []).append(node)
    mean = {part: sum(nodes) / len(nodes) for part, nodes in places.items()}
    feeds = {
        (parts[value.producer], parts[reader])
        for value in dag.values
        for reader in value.readers
        if parts[value.producer] != parts[reader]
    }
    rank: dict[int, int] = {}
    left, newest = set(places), -1
    while left:
        waiting = {b for a, b in feeds if a in left and b in left}
        ready = (left - waiting) or left
        newest = min(ready, key=lambda part: ((newest, part) not in feeds, mean[part], part))
        rank[newest] = len(rank)
        left.remove(newest)
    return [rank[part] for part in parts]


def _order_of(dag: WeightedDag, rank: Sequence[int]) -> tuple[int, ...]:
    """The topological order that takes the ready node of lowest rank, earliest first."""
    waits = [0] * len(dag.weights)
    readers: list[list[int]] = [[] for _ in dag.weights]
    for value in dag.values:
        readers[value.producer].extend(value.readers)
        for reader in value.readers:
            waits[reader] += 1
    ready = [(rank[node], node) for node, count in enumerate(waits) if not count]
    heapq.heapify(ready)
    order = []
    while ready:
        _, node = heapq.heappop(ready)
        order.append(node)
        for reader in readers[node]:
            waits[reader] -= 1
            if not waits[reader]:
                heapq.heappush(ready, (rank[reader], reader))
    return tuple(order)
