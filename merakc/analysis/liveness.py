"""In whose memory the values of a graph live, and how many bytes are alive while it runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from merakc.analysis.aliases import is_view, last_uses
from merakc.analysis.overwrites import overwrites
from merakc.ir.graph import Graph, Node, Ref, TensorSpec
from merakc.kernels import scores
from merakc.kernels.ops import OUT
from merakc.kernels.ring import attention as ring


@dataclass(frozen=True, slots=True)
class LiveBytes:
    """What running a graph allocates: at its highest point, and what its outputs keep."""

    peak_bytes: int
    kept_bytes: int


@dataclass(frozen=True, slots=True)
class Memory:
    """A piece of memory that an input lives in, on the device or the host; several inputs may share
    one.
    """

    owner: str
    size_bytes: int
    host_bytes: int = 0


def owners(graph: Graph, given: Mapping[str, Ref] | None = None) -> dict[Ref, Ref]:
    """The value whose memory each value lives in; that of some inputs is `given`."""
    over = graph.told(overwrites)
    owner = {Ref(i.name): (given or {}).get(i.name, Ref(i.name)) for i in graph.inputs}
    for node in graph.nodes:
        for ref in node.made:
            if node.name in over:
                owner[ref] = owner[node.args[over[node.name]]]
            else:
                owner[ref] = owner[node.refs[0]] if is_view(node) else ref
    return owner


def working_bytes(node: Node, specs: Mapping[Ref, TensorSpec]) -> int:
    """What a call takes while it runs, and neither reads nor gives."""
    if node.op in ring.PLACES:
        at = ring.PLACES[node.op]
        query, *block = (specs[ref] for ref in node.args[at : at + 3])
        shapes = [spec.shape for spec in (query, *block)]
        hops = len(node.args[-3])
        return ring.working_bytes(shapes, query.dtype, hops, backward=at > 0)
    place = scores.PLACES.get(node.op)
    if place is None:
        return 0
    x, weight = (specs[ref] for ref in node.args[place : place + 2])
    asked = scores.ONEDNN_PLACES.get(node.op)
    return scores.working_bytes(
        x.shape, weight.shape[0], x.dtype,
        backward=place > 0, onednn=asked is not None and node.args[asked],
    )  # fmt: skip


def live_bytes(
    graph: Graph,
    handed: Mapping[str, Memory] | None = None,
    beside: Mapping[str, tuple[int, int]] | None = None,
    owner: Mapping[Ref, Ref] | None = None,
) -> LiveBytes:
    """Live ranges of the graph's own values.

    A view keeps the memory of what it looks at. Every other value lives from its node to its last
    reader, or beyond the graph if it is an output. Inputs are counted by whoever holds them, but
    those in `handed` (name -> memory) are given away: their memory is freed after its last reader,
    and makes room for the graph's own values. `beside` is what comes at a node from elsewhere, and
    what goes after it. `owner` says in whose memory each value lives, where that is known.
    """
    handed, beside, specs = handed or {}, beside or {}, graph.specs()
    owner = owner or owners(graph, {name: Ref(m.owner) for name, m in handed.items()})
    sizes = {Ref(m.owner): m.size_bytes for m in handed.values()}
    held = {owner[Ref(i.name)] for i in graph.inputs} - sizes.keys()
    given = frozenset(sizes)
    made: list[int] = []  # bytes, by each node
    for node in graph.nodes:
        own = [ref for ref in node.made if owner[ref] == ref]
        on_host = node.op == OUT
        sizes |= {ref: 0 if on_host else specs[ref].size_bytes for ref in own}
        made.append(sum(sizes[ref] for ref in own))
    kept = {owner[o.ref] for o in graph.outputs}
    ending: Counter[int] = Counter()
    for ref, k in (dict.fromkeys(given, 0) | last_uses(graph, owner)).items():
        if ref not in kept and ref not in held:
            ending[k] += sizes[ref]
    alive = peak = 0
    for k, node in enumerate(graph.nodes):
        comes, goes = beside.get(node.name, (0, 0))
        alive += made[k] + comes
        peak = max(peak, alive + working_bytes(node, specs))
        alive -= goes + ending[k]
    return LiveBytes(peak, sum(sizes[r] for r in kept - held - given))
