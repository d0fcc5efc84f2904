"""What each compute of a micro-batch does to memory, from the live ranges of its values."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from merakc.analysis.accumulation import accumulated, added_at_once
from merakc.analysis.liveness import Memory, live_bytes, owners
from merakc.ir.graph import Graph, Input, InputKind, OutputKind, Ref
from merakc.ir.program import ActionKind, StageGraphs
from merakc.kernels.ops import OUT


@dataclass(frozen=True, slots=True)
class Sum:
    """What the gradients of these parameters are added to as soon as a compute has made them.

    It is there from the first of them on. Its reduction starts when the last one has come, and ends
    when the next one of another sum starts. `reducing_bytes` are there while it runs, and where the
    sum is scattered, that until then.
    """

    parameters: frozenset[str]
    size_bytes: int
    is_scattered: bool = False
    reducing_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ActionBytes:
    """What one compute of a micro-batch on a stage does to memory.

    `peak_bytes` is its highest point over what was alive before, what it reads included there.
    After it, `held` are the pieces of memory alive for later computes of the micro-batch, received
    values among them, `sent` those of its messages, by value, `waist` those that the head reads,
    and `gradient_bytes` are gradients of parameters.
    """

    peak_bytes: int
    held: frozenset[Memory]
    sent: Mapping[str, Memory]
    gradient_bytes: int
    waist: frozenset[Memory] = frozenset()

    @property
    def held_bytes(self) -> int:
        """Bytes alive for later computes."""
        return sum(m.size_bytes for m in self.held)

    @property
    def host_bytes(self) -> int:
        """Those on the host."""
        return sum(m.host_bytes for m in self.held)


def order_bytes(
    chunk: StageGraphs,
    order: Sequence[ActionKind],
    sums: Sequence[Sum] = (),
    *,
    later: bool = False,
    fused: bool = False,
) -> tuple[ActionBytes, ...]:
    """The bytes of each compute of a micro-batch, run on a stage in this order.

    A value is let go of by the last piece that reads it, at its last reader there. Gradients that
    are added to `sums` are let go of at once, and are not among an action's gradient bytes. Neither
    are those that calls add to what earlier micro-batches have left, if there is any, of a `later`
    one; `fused` calls add to nothing.
    """
    pieces = chunk.pieces(order)
    kept = [frozenset[str]()]
    for piece in reversed(pieces[1:]):
        kept.append(kept[-1] | (chunk.taken(piece) if piece else frozenset()))
    held = {i.name: _memory(i, "received") for i in chunk.forward.inputs if _is_received(i)}
    for item in chunk.forward.inputs:
        if item.name in kept[-1] and chunk.rewrites(item):
            held[item.name] = _memory(item, "copied")
    found = []
    for kind, piece, leaves in zip(order, pieces, reversed(kept), strict=True):
        if kind.sends_gradients and piece is not None:
            whole = [*piece.inputs, *(chunk.weight_grad.inputs if chunk.weight_grad else ())]
            handed_on = (OutputKind.ACTIVATION, OutputKind.WAIST)
            received = {o.name for o in chunk.forward.outputs if o.kind in handed_on}
            tangents = (i for i in whole if i.kind is InputKind.TANGENT and i.target in received)
            held |= {i.key: _memory(i, "tangent") for i in tangents}
        beside: dict[str, tuple[int, int]] = {}
        if piece is not None:
            added = accumulated(piece, chunk.parameters, fused=fused)
            piece, beside = _summed(chunk, piece, sums, added, later=later)
        bytes_, held = _run_piece(chunk, kind, piece, held, leaves, beside)
        found.append(bytes_)
    return tuple(found)


def _summed(
    chunk: StageGraphs, piece: Graph, sums: Sequence[Sum], added: Mapping[str, str], *, later: bool
) -> tuple[Graph, dict[str, tuple[int, int]]]:
    """The piece without the gradients that are added up, and what sums take beside its nodes.

    Those in `added` (output -> node) have no memory of their own where their sum is counted.
    """
    targets = {i.name: i.target for i in chunk.forward.inputs}
    sum_of = {name: k for k, s in enumerate(sums) for name in s.parameters}
    gone = {
        o.name: sum_of[targets[o.name]]
        for o in piece.outputs
        if o.kind is OutputKind.GRADIENT and targets.get(o.name) in sum_of
    }
    if not gone and not added:
        return piece, {}
    place = {node.name: k for k, node in enumerate(piece.nodes)}
    made: dict[int, list[int]] = {}
    for out in piece.outputs:
        if out.name in gone and out.ref.node in place:
            made.setdefault(gone[out.name], []).append(place[out.ref.node])
    beside: dict[str, tuple[int, int]] = {}
    order = sorted(made, key=lambda number: max(made[number]))
    ends = [*(max(made[number]) for number in order[1:]), len(piece.nodes) - 1]
    for number, end in zip(order, ends, strict=False):
        found, places = sums[number], made[number]
        left_bytes = found.size_bytes if found.is_scattered else 0
        for at, comes, goes in (
            (min(places), found.size_bytes, 0),
            (min(max(places) + 1, end), found.reducing_bytes, 0),
            (end, 0, found.reducing_bytes + left_bytes),
        ):
            before = beside.get(piece.nodes[at].name, (0, 0))
            beside[piece.nodes[at].name] = before[0] + comes, before[1] + goes
    there = {name: node for name, node in added.items() if later or name in gone}
    for node in there.values():
        own_bytes = added_at_once(piece.nodes[place[node]])
        before = beside.get(node, (0, 0))
        beside[node] = before[0] + own_bytes, before[1] + own_bytes
    nodes = tuple(
        replace(n, outputs=(None, *n.outputs[1:])) if n.name in there.values() else n
        for n in piece.nodes
    )
    outputs = tuple(o for o in piece.outputs if o.name not in gone.keys() | there.keys())
    return replace(piece, nodes=nodes, outputs=outputs), beside


def _is_received(item: Input) -> bool:
    return item.kind is InputKind.ACTIVATION


def _memory(item: Input, what: str) -> Memory:
    return Memory(f"{what} {item.key}", item.spec.size_bytes)


def _total(held: Mapping[str, Memory]) -> int:
    return sum({m.owner: m.size_bytes for m in held.values()}.values())


def _run_piece(
    chunk: StageGraphs,
    kind: ActionKind,
    piece: Graph | None,
    held: Mapping[str, Memory],
    leaves: Collection[str],
    beside: Mapping[str, tuple[int, int]],
) -> tuple[ActionBytes, dict[str, Memory]]:
    """What running a piece does, and what the micro-batch holds after it."""
    kept = {k: m for k, m in held.items() if k in leaves}
    if piece is None:
        return ActionBytes(0, frozenset(kept.values()), {}, 0), kept
    still = {m.owner for m in kept.values()}
    given = {i.name: held[i.key] for i in piece.inputs if i.key in held}
    read = {m.owner for m in given.values()}
    unread = {k: m for k, m in held.items() if m.owner not in still | read}
    handed = {name: m for name, m in given.items() if m.owner not in still}
    home = owners(piece, {name: Ref(m.owner) for name, m in given.items()})
    peak_bytes = live_bytes(piece, handed, beside, home).peak_bytes - _total(unread)
    specs = piece.specs()
    known = {m.owner: m for m in given.values()}
    inputs = {i.name for i in piece.inputs} - given.keys()
    on_host = {n.name for n in piece.nodes if n.op == OUT}

    def memory(ref: Ref) -> Memory | None:
        owner = home[ref]
        if owner.node in known:
            return known[owner.node]
        if owner.node in inputs:  # a parameter, a part of the batch
            return None
        sizes = specs[owner].size_bytes, 0
        return Memory(f"{kind} {owner}", *(sizes[::-1] if owner.node in on_host else sizes))

    sent: dict[str, Memory] = {}
    waist: set[Memory] = set()
    gradient_bytes = 0
    received = {i.name for i in chunk.forward.inputs if _is_received(i)}
    for out in piece.outputs:
        own = memory(out.ref)
        if out.kind is OutputKind.SAVED and own is not None:
            if out.name in leaves:
                kept[out.name] = own
        elif out.kind is OutputKind.ACTIVATION or out.name in received:
            if own is not None:
                sent[out.name] = own
        elif out.kind is OutputKind.WAIST and own is not None:
            waist.add(own)
        elif out.kind is OutputKind.GRADIENT:
            gradient_bytes += specs[out.ref].size_bytes
    after = frozenset(kept.values())
    return ActionBytes(peak_bytes, after, sent, gradient_bytes, frozenset(waist)), kept
