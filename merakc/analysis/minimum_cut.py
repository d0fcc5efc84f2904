"""Minimum cuts between two sides of a graph, by costs of any size."""

from __future__ import annotations

import numpy as np

UNITS = 10**9  # the integer capacity that no cut is dearer than
LEAST_UNITS = 16  # that every cost should be


class MinimumCut:
    """A minimum cut between "source" and "sink"."""

    def __init__(self) -> None:
        self.names = {"source": 0, "sink": 1}
        self.edges: dict[tuple[int, int], float] = {}

    def add(self, tail: str, head: str, cost: float = float("inf")) -> None:
        """Adds an edge; its cost counts where its tail is on the source's side, its head not."""
        key = tuple(self.names.setdefault(n, len(self.names)) for n in (tail, head))
        self.edges[key[0], key[1]] = cost

    def source_side(self) -> tuple[set[str], float]:
        """The names on the source's side of the smallest cut of least cost, and what it costs
        less than the cut around the source alone.
        """
        from scipy.sparse import coo_array  # long to import, and not always needed
        from scipy.sparse.csgraph import breadth_first_order, maximum_flow

        costs = np.array(list(self.edges.values()))
        most = costs[np.isfinite(costs)].sum()
        if not most:
            return set(), 0.0
        least = costs[costs > 0].min()
        rows, columns = (np.array(x) for x in zip(*self.edges, strict=True))
        shape = len(self.names), len(self.names)
        while True:
            unit = most / UNITS
            capacities = np.full(len(costs), 2 * UNITS, dtype=np.int32)
            capacities[costs <= most] = np.rint(costs[costs <= most] / unit)
            graph = coo_array((capacities, (rows, columns)), shape).tocsr()
            found = maximum_flow(graph, 0, 1)
            # No edge that is dearer than a cut is in the least one: without them units are smaller.
            cut = (2 * found.flow_value + len(costs)) * unit
            if least >= LEAST_UNITS * unit or cut > most / 2:
                break
            most = cut
        left = graph.astype(np.int64) - found.flow.astype(np.int64)
        left.data[left.data < 0] = 0
        left.eliminate_zeros()
        reached = set(breadth_first_order(left, 0, return_predecessors=False).tolist())
        everything = sum(c for (tail, _), c in self.edges.items() if tail == 0)
        side = {name for name, k in self.names.items() if k in reached}
        return side, everything - found.flow_value * unit
