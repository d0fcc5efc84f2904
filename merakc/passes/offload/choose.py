"""Which of the values that a stage keeps for its backward wait on the host.

Each takes its bytes from the device's highest point, which is where the forward ends, and costs
nothing where both its copies run under computation. So those go first that lie longest between
the call that makes them and the first that reads them again: they leave while the link is free and
are wanted back last. Of the last value that is asked for, a part moves.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from merakc.analysis.liveness import owners
from merakc.costs.device import Place
from merakc.costs.nodes import start_seconds
from merakc.ir.graph import Graph, InputKind, OutputKind
from merakc.ir.program import StageGraphs
from merakc.passes.sharding.experts.dispatch import rows_of_experts

# A move takes two calls and the latency of the link, whatever its size.
LEAST_BYTES = 1 << 12
READERS = ("backward", "input_grad", "weight_grad")


@dataclass(frozen=True, slots=True)
class Kept:
    """A value that may move, by the name of its output; it is not read for `idle_s` seconds."""

    name: str
    numel: int
    size_bytes: int
    idle_s: float


def movable(stage: StageGraphs, place: Place) -> tuple[Kept, ...]:
    """The values that may move, in the order in which they should.

    Each has memory of its own, all of which it fills and no other value reads for the backward, or
    none would be freed.
    """
    forward = stage.forward
    made_s, home, specs = start_seconds(forward, place), owners(forward), forward.specs()
    nodes = {n.name for n in forward.nodes}
    leaving = Counter(home[o.ref] for o in forward.outputs)
    read_s, uncounted = _read_seconds(stage, place), rows_of_experts(forward)
    found = []
    for out in forward.outputs:
        owner, spec = home[out.ref], specs[out.ref]
        own = owner.node in nodes and leaving[owner] == 1
        whole = spec.size_bytes == specs[owner].size_bytes >= LEAST_BYTES
        whole = whole and uncounted.isdisjoint(spec.shape)
        if out.kind is OutputKind.SAVED and own and whole and out.name in read_s:
            idle_s = made_s[""] - made_s[out.ref.node] + read_s[out.name]
            found.append(Kept(out.name, spec.numel, spec.size_bytes, idle_s))
    return tuple(sorted(found, key=lambda one: -one.idle_s))


def chosen(stage: StageGraphs, share: float, place: Place) -> dict[str, int]:
    """How many elements of which values move, so that `share` of the bytes that may do."""
    values = movable(stage, place)
    left = round(share * sum(one.size_bytes for one in values))
    found: dict[str, int] = {}
    for one in values:
        part = min(left, one.size_bytes)
        if part < min(LEAST_BYTES, one.size_bytes):
            break
        found[one.name] = part * one.numel // one.size_bytes
        left -= part
    return found


def _read_seconds(stage: StageGraphs, place: Place) -> dict[str, float]:
    """When what the forward saves is first read, in seconds since the end of the forward."""
    found: dict[str, float] = {}
    before_s = 0.0
    split = stage.input_grad is not None
    for name in READERS[1:] if split else READERS[:1]:
        graph: Graph | None = getattr(stage, name)
        if graph is None:
            continue
        starts_s, readers = start_seconds(graph, place), graph.users()
        for item in graph.inputs:
            if item.kind is InputKind.SAVED:
                first_s = min((starts_s[n.name] for n in readers[item.name]), default=starts_s[""])
                found.setdefault(item.target, before_s + first_s)
        before_s += starts_s[""]
    return found
