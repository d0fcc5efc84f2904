"""A forward in pieces: what comes before its repeated blocks, each block, and what comes after.

Blocks are found by the numbers in the paths of modules (`model.layers.7.mlp`). A piece is all that
the cost of a stage is made of, so that equal blocks are looked at once however many there are.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from merakc.analysis.aliases import equal_values, is_view, view_roots
from merakc.costs.work.flops import COLLECTIVES, node_flops
from merakc.costs.work.kernels import (
    CONJUGATE,
    HANDS_ON,
    LOSSES,
    Work,
    moves_nothing,
    parts_work,
)
from merakc.ir.graph import Graph, InputKind, Node, Ref, TensorSpec
from merakc.kernels.ops import is_pointwise

NUMBERED = re.compile(r"^(.*?)\.?(?<![^.])(\d+)(?:\.|$)")
# Ops whose backward reads nothing of what they had read: linear in their one argument.
KEEPS_NOTHING = HANDS_ON | {
    "aten.mul.Scalar", "aten.div.Scalar", "aten.neg.default", "aten.to.dtype", "aten.clone.default",
    "aten.contiguous.default", "aten.cat.default", "aten.sum.default", "aten.sum.dim_IntList",
    "aten.mean.default", "aten.mean.dim", "merakc.dropout.default",
}  # fmt: skip
# Ops whose backward reads what they pick by, and none of the values.
PICKS = ("masked_fill", ".where.", "index_select", "aten.index.", "aten.gather.")
# Ops whose backward reads their result.
KEEPS_RESULT = ("softmax", "aten.exp.", "aten.tanh.", "aten.sigmoid.", "aten.relu.", "aten.rsqrt.")
# Values that are no larger are not worth a call that makes them again.
LEAST_BYTES = 64 << 10
# What a byte that a call makes again costs beside one that is kept. A value of 16 bits is worth a
# call in float32 and the cast behind it: three bytes for each that is kept.
AGAIN = 0.3
CASTS = frozenset({"aten.to.dtype", "aten._to_copy.default"})


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a forward, of one tp rank and one micro-batch.

    `path` is the module that all blocks of its kind are numbered under, "" of what is no block.
    `parameters` are the numbers of trained elements by name, of which other blocks read those that
    are `shared`, and of which those of `experts` are of the rank's own; `saved_bytes` what the
    backward reads again; `handed_bytes` what the pieces after it read; `gradient_bytes` the most
    gradients that a call of its backward takes and gives, but for those of parameters;
    `deferred_bytes` what the products of its weight gradients read.
    """

    path: str
    work: Work
    parameters: Mapping[str, int]
    saved_bytes: int
    handed_bytes: int
    shared: frozenset[str] = frozenset()
    gradient_bytes: int = 0
    deferred_bytes: int = 0
    experts: frozenset[str] = frozenset()

    @property
    def parameter_count(self) -> int:
        """Trained elements."""
        return sum(self.parameters.values())


def cut_pieces(graph: Graph, *, fused: bool = False, runs: int = 1) -> tuple[Piece, ...]:
    """The pieces of a tp rank's forward, in the order in which they run.

    With `fused`, its kernels are those of `merakc.costs.work.kernels.graph_work`, and all that is
    saved is kept, where merakc's own programs make some of it again. Each block, and
    what lies between blocks, is cut into at most so many `runs` of as many nodes.
    """
    starts = [start for part in part_runs(graph, runs) for start in part]
    paths = [path for path, _ in starts]
    part_of: dict[str, int] = {}
    for k, (_, first) in enumerate(starts):
        last = starts[k + 1][1] if k + 1 < len(starts) else len(graph.nodes)
        part_of |= {node.name: k for node in graph.nodes[first:last]}
    parameters = _parameters(graph, part_of, len(starts))
    specs, kept = graph.specs(), _saved(graph, part_of, len(starts))
    again = set[Ref]() if fused else _made_again(graph, set().union(*kept), specs)
    saved = [sum(specs[ref].size_bytes for ref in own - again) for own in kept]
    repeated = {ref.node for ref in again}
    works = parts_work(graph, part_of, len(starts), fused=fused, again=repeated)
    handed = _handed(graph, part_of, len(starts))
    shared = _shared(parameters, starts, [first for path, first in part_starts(graph) if path])
    gradients = _gradients(graph, part_of, len(starts))
    deferred = _deferred(graph, part_of, len(starts))
    return tuple(map(Piece, paths, works, parameters, saved, handed, shared, gradients, deferred))


def part_starts(graph: Graph) -> list[tuple[str, int]]:
    """The path and the first node of each piece."""
    units: dict[tuple[str, str], list[int]] = {}
    for k, node in enumerate(graph.nodes):
        found = NUMBERED.match(node.module)
        if found:
            path, number = found.groups()
            units.setdefault((path, number), []).append(k)
    counts = Counter(path for path, _ in units)
    blocks = sorted(
        (places[0], places[-1], path) for (path, _), places in units.items() if counts[path] > 1
    )
    starts: list[tuple[str, int]] = [("", 0)]
    for j, (first, last, path) in enumerate(blocks):
        path_before, before = starts[-1]
        if not path_before and not _is_recorded(graph.nodes[before:first]):
            starts.pop()
            first = before
        starts.append((path, first))
        end, _, then = (*blocks[j + 1 :], (len(graph.nodes), 0, None))[0]
        if then != path and _is_recorded(graph.nodes[last + 1 : end]):
            starts.append(("", last + 1))
    return starts


def _is_recorded(nodes: Iterable[Node]) -> bool:
    """Whether any of them is of the model's: collectives between two blocks have neither a module
    nor a line, and go with one of them.
    """
    return any(node.module or node.source for node in nodes)


def part_runs(graph: Graph, runs: int) -> list[list[tuple[str, int]]]:
    """The path and the first node of each run of each part, of which none has more nodes than
    another by more than one.
    """
    starts = part_starts(graph)
    found = []
    for (path, first), (_, end) in zip(starts, [*starts[1:], ("", len(graph.nodes))], strict=True):
        nodes = end - first
        count = max(1, min(runs, nodes))
        found.append([(path, first + k * nodes // count) for k in range(count)])
    return found


def _parameters(graph: Graph, part_of: Mapping[str, int], parts: int) -> list[dict[str, int]]:
    """The trained elements of each piece; of a parameter that two pieces read, in both."""
    trained = {
        Ref(i.name): i for i in graph.inputs if i.kind is InputKind.PARAMETER and i.requires_grad
    }
    found: list[dict[str, int]] = [{} for _ in range(parts)]
    for node in graph.nodes:
        for ref in node.refs:
            if ref in trained:
                found[part_of[node.name]][trained[ref].target] = trained[ref].spec.numel
    return found


def _shared(
    parameters: Sequence[Mapping[str, int]],
    starts: Sequence[tuple[str, int]],
    blocks: Sequence[int],
) -> list[frozenset[str]]:
    """Of each piece's parameters those that several blocks read; `blocks` are their first nodes."""
    readers: dict[str, set[int]] = {}
    for own, (path, first) in zip(parameters, starts, strict=True):
        for name in own if path else ():
            readers.setdefault(name, set()).add(bisect_right(blocks, first))
    return [frozenset(name for name in own if len(readers.get(name, ())) > 1) for own in parameters]


def _made_again(graph: Graph, saved: set[Ref], specs: Mapping[Ref, TensorSpec]) -> set[Ref]:
    """The saved values that backwards make again (`merakc.passes.autodiff.rematerialise`): what a
    pointwise call makes of what is there anyway.
    """
    roots = view_roots(graph)
    kept = {roots.get(ref, ref) for ref in saved}
    worth = {ref for ref in kept if specs[ref].size_bytes > LEAST_BYTES}
    if not worth:
        return set()
    others = (i for i in graph.inputs if i.kind is not InputKind.ACTIVATION)
    there = kept | {Ref(i.name) for i in others}
    waited: set[Ref] = set()  # values that a call of another kind has read
    made: dict[Ref, tuple[float, frozenset[Ref]]] = {}  # of what is there: at what cost, by what
    found: set[Ref] = set()
    for node in graph.nodes:
        if is_view(node):
            continue
        own, read = Ref(node.name), {roots.get(ref, ref) for ref in node.refs}
        if not (is_pointwise(node.op) or node.op in CASTS):
            waited |= read
        elif read <= there.union(made) - waited:
            before = [made[ref] for ref in read - there]
            size_bytes = node.spec.size_bytes
            # What is cast to more bits is read by others, too.
            cost = 0.0 if _widens(node, specs) else AGAIN * size_bytes
            cost += sum(cost for cost, _ in before)
            calls = frozenset({own}).union(*(calls for _, calls in before))
            if own in worth and cost < size_bytes:
                found |= calls
            elif own not in there:
                made[own] = cost, calls
    return found


def _widens(node: Node, specs: Mapping[Ref, TensorSpec]) -> bool:
    """Whether it is a cast that loses nothing, so that what it reads is as good as its result."""
    if node.op not in CASTS:
        return False
    before, after = specs[node.refs[0]].dtype, node.spec.dtype
    floats = before.is_floating_point and (after.is_floating_point or after.is_complex)
    return floats and (before == after or before.itemsize < after.itemsize)


def _saved(graph: Graph, part_of: Mapping[str, int], parts: int) -> list[set[Ref]]:
    """What each piece's backward reads of its forward."""
    specs, grads = graph.specs(), graph.grad_values()
    held = {Ref(i.name) for i in graph.inputs if i.kind is not InputKind.ACTIVATION}

    # What was expanded and then reshaped is copied again, and what was cast to more bits cast.
    origin = view_roots(graph, lambda node, _: moves_nothing(node) or _widens(node, specs))
    equal = equal_values(graph)
    found: list[set[Ref]] = [set() for _ in range(parts)]
    for node in graph.nodes:
        if not moves_nothing(node) and node.grad_outputs(grads):
            kept = _kept(node, specs, grads)
            if node.op not in LOSSES:  # these keep a value of their own, as large
                kept = {origin.get(ref, ref) for ref in kept}
                kept = {equal.get(ref, ref) for ref in kept}
            found[part_of[node.name]] |= kept - held
    return found


def _gradients(graph: Graph, part_of: Mapping[str, int], parts: int) -> list[int]:
    """The most bytes of gradients that a call of each piece's backward takes and gives."""
    specs, grads = graph.specs(), graph.grad_values()
    held = {Ref(i.name) for i in graph.inputs if i.kind is not InputKind.ACTIVATION}
    found = [0] * parts
    for node in graph.nodes:
        if not moves_nothing(node):
            own = (Ref(node.name, k) for k, out in enumerate(node.outputs) if out is not None)
            refs = {ref for ref in (*own, *node.refs) if ref in grads and ref not in held}
            size = sum(specs[ref].size_bytes for ref in refs)
            found[part_of[node.name]] = max(found[part_of[node.name]], size)
    return found


def _deferred(graph: Graph, part_of: Mapping[str, int], parts: int) -> list[int]:
    """The bytes that the products of each piece's weight gradients read: what was multiplied by the
    weights, and the gradients of what that gave.
    """
    specs, roots = graph.specs(), view_roots(graph)
    weights = {
        Ref(i.name) for i in graph.inputs if i.kind is InputKind.PARAMETER and i.requires_grad
    }
    read: list[set[Ref]] = [set() for _ in range(parts)]
    gradients = [0] * parts
    for node in graph.nodes:
        refs = {roots.get(ref, ref) for ref in node.refs}
        if refs & weights and node.grad and node_flops(node, specs):
            read[part_of[node.name]] |= refs - weights
            made = (out.size_bytes for out in node.outputs if out is not None)
            gradients[part_of[node.name]] += sum(made)
    return [
        sum(specs[ref].size_bytes for ref in own) + more
        for own, more in zip(read, gradients, strict=True)
    ]


def _kept(node: Node, specs: Mapping[Ref, TensorSpec], grads: Set[Ref]) -> set[Ref]:
    """The values that the backward of a node reads."""
    if node.op in KEEPS_NOTHING or node.op in COLLECTIVES or node.op in CONJUGATE:
        return set()
    own = {Ref(node.name, k) for k, out in enumerate(node.outputs) if out is not None}
    if any(name in node.op for name in KEEPS_RESULT):
        return own
    if "attention" in node.op:
        return own | set(node.refs)
    if node.op in LOSSES:
        largest = max(node.refs, key=lambda ref: specs[ref].size_bytes)
        return {largest} if "entropy" in node.op else set()
    if any(name in node.op for name in PICKS):
        return {ref for ref in node.refs if not specs[ref].dtype.is_floating_point}
    if node.op in ("aten.mul.Tensor", "aten.matmul.default", "aten.bmm.default", "aten.mm.default"):
        pairs = zip(node.refs, reversed(node.refs), strict=True)
        return {ref for ref, other in pairs if other in grads and len(node.refs) > 1}
    return set(node.refs)


def _handed(graph: Graph, part_of: Mapping[str, int], parts: int) -> list[int]:
    """The bytes of floating-point values that pass from each piece to a later one."""
    specs = graph.specs()
    crossing: list[set[Ref]] = [set() for _ in range(parts)]
    for node in graph.nodes:
        for ref in node.refs:
            if ref.node in part_of and specs[ref].dtype.is_floating_point:
                for part in range(part_of[ref.node], part_of[node.name]):
                    crossing[part].add(ref)
    return [sum(specs[ref].size_bytes for ref in refs) for refs in crossing]
