"""Bytes alive while a graph runs, from the live ranges of its values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from merakc.costs.flops import FREE
from merakc.ir.graph import Graph, InputKind, OutputKind, Ref
from merakc.ir.program import Chunk


@dataclass(frozen=True, slots=True)
class LiveBytes:
    """What running a graph allocates: at its highest point, and what its outputs keep."""

    peak_bytes: int
    kept_bytes: int


@dataclass(frozen=True, slots=True)
class Memory:
    """A piece of memory that an input lives in; several inputs may share one."""

    owner: str
    size_bytes: int


def live_bytes(graph: Graph, handed: Mapping[str, Memory] | None = None) -> LiveBytes:
    """Live ranges of the graph's own values.

    A view keeps the memory of what it looks at. Every other value lives from its node to its last
    reader, or beyond the graph if it is an output. Inputs are counted by whoever holds them, but
    those in `handed` (name -> memory) are given away: their memory is freed after its last reader,
    and makes room for the graph's own values.
    """
    handed = handed or {}
    owner = _owners(graph, {name: Ref(m.owner) for name, m in handed.items()})
    sizes = {ref: spec.size_bytes for ref, spec in graph.specs().items() if owner[ref] == ref}
    given = {Ref(m.owner): m.size_bytes for m in handed.values()}
    held = {Ref(i.name) for i in graph.inputs} - given.keys()
    sizes |= given
    last = dict.fromkeys(given, 0)
    for k, node in enumerate(graph.nodes):
        for ref in (*node.refs, *(Ref(node.name, i) for i, o in enumerate(node.outputs) if o)):
            last[owner[ref]] = k
    kept = {owner[o.ref] for o in graph.outputs}
    ending: dict[int, list[Ref]] = {}
    for ref, k in last.items():
        if ref not in kept and ref not in held:
            ending.setdefault(k, []).append(ref)
    alive = peak = 0
    for k, node in enumerate(graph.nodes):
        for i, spec in enumerate(node.outputs):
            ref = Ref(node.name, i)
            if spec is not None and owner[ref] == ref:
                alive += sizes[ref]
        peak = max(peak, alive)
        alive -= sum(sizes[r] for r in ending.get(k, ()))
    return LiveBytes(peak, sum(sizes[r] for r in kept - held - given.keys()))


def backward_live_bytes(chunk: Chunk) -> LiveBytes:
    """The backward over what was alive before it: it frees the saved values as it goes."""
    if chunk.backward is None:
        return LiveBytes(0, 0)
    owner = _owners(chunk.forward)
    inputs = {i.name: i for i in chunk.forward.inputs}
    specs = chunk.forward.specs()
    saved = {o.name: owner[o.ref] for o in chunk.forward.outputs if o.kind is OutputKind.SAVED}
    handed: dict[str, Memory] = {}
    for item in chunk.backward.inputs:
        ref = saved.get(item.target) if item.kind is InputKind.SAVED else Ref(item.name)
        assert ref is not None
        source = inputs.get(ref.node)
        arrived = source is not None and source.kind is InputKind.ACTIVATION
        if arrived or (item.kind is InputKind.SAVED and source is None):
            handed[item.name] = Memory(f"handed:{ref}", specs[ref].size_bytes)
    return live_bytes(chunk.backward, handed)


def saved_bytes(chunk: Chunk) -> int:
    """What a micro-batch holds from its forward to its backward, received activations included."""
    if chunk.backward is None:
        return 0
    owner = _owners(chunk.forward)
    inputs = {i.name for i in chunk.forward.inputs}
    specs = chunk.forward.specs()
    saved = {owner[o.ref] for o in chunk.forward.outputs if o.kind is OutputKind.SAVED}
    own = sum(specs[r].size_bytes for r in saved if r.node not in inputs)
    held = {i.name for i in chunk.backward.inputs if i.kind is InputKind.ACTIVATION}
    held |= {r.node for r in saved}
    arrived = [i for i in chunk.forward.inputs if i.kind is InputKind.ACTIVATION]
    return own + sum(i.spec.size_bytes for i in arrived if i.name in held)


def _owners(graph: Graph, given: Mapping[str, Ref] | None = None) -> dict[Ref, Ref]:
    """The value whose memory each value lives in; that of some inputs is `given`."""
    owner = {Ref(i.name): (given or {}).get(i.name, Ref(i.name)) for i in graph.inputs}
    for node in graph.nodes:
        for index, spec in enumerate(node.outputs):
            if spec is not None:
                ref = Ref(node.name, index)
                owner[ref] = owner[node.refs[0]] if node.op in FREE and node.refs else ref
    return owner
