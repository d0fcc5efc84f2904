"""Which calls run on the ranks that have the experts, on rows that are sent there and back.

The experts' products and what stands between them. How many rows a rank gets is known when they
come: the graph counts with `rows`, a prime that no other size in it is a multiple of, so that what
depends on it shows (`without_rows`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from merakc.errors import ShardError
from merakc.ir.graph import Graph, InputKind, Node, Ref
from merakc.ir.layout import DimFactor, Layout, block_sums
from merakc.kernels.ops import STARTS
from merakc.passes.sharding.dims import Dims, given
from merakc.passes.sharding.experts.blocks import Experts, in_the_way
from merakc.passes.sharding.experts.ends import GROUPED
from merakc.passes.sharding.experts.refusals import nearest
from merakc.passes.sharding.factors import leaves
from merakc.passes.sharding.layouts import Dispatched, SequenceSplit, Sharding

Rule = Callable[[Node], Dims]
STACK = "aten.stack.default"
SLICED = "aten.slice_backward.default"
EXCHANGES = ("merakc.dispatch.default", "merakc.combine.default")


class Mixtures(Protocol):
    """A graph whose experts were looked for."""

    dims: Dims
    graph: Graph
    experts: tuple[Experts, ...]

    def rule(self, node: Node) -> Dims:
        """The dims of a node by itself."""


def _fault(problem: Mixtures) -> str:
    """What stands in the way of blocks."""
    node = next(in_the_way(problem.dims, problem.rule), None)
    if node is None:
        return ""
    told = f"{node.op} at {node.source}"
    told = f"where the groups of {told} end" if node.op == GROUPED else told
    return f": {told} is not known to follow from the sorted numbers, or from each row, alone"


def with_experts(problem: Mixtures, sharding: Sharding, load: Sequence[float], tp: int) -> Sharding:
    """The same sharding with the experts of each sequence on ranks of their own, of each of `tp`.
    Raises `ShardError` where some of them, or all, are not found.
    """
    every, layouts, sequences = 0, dict(sharding.layouts), []
    for sequence in sharding.sequences:
        blocks = [b for b in problem.experts if b.nodes[0] in sequence.nodes]
        parts = sequence.layouts.values()
        own, weights = dispatched(
            problem.dims, problem.rule, blocks, sharding.tp, parts, load, tp=tp
        )
        layouts |= weights
        every += len(blocks)
        sequences.append(replace(sequence, dispatched=own))
    graph = problem.graph
    if left := [n for n in graph.nodes if n.op == GROUPED and not _among(n.name, sequences)]:
        raise ShardError(
            f"ep={sharding.tp}: the experts at {left[0].source} are not found to compute row by "
            f"row, so that their rows cannot be sent{_fault(problem)}; use ep=1"
        )
    if not every:
        raise ShardError(
            f"ep={sharding.tp}: no experts are found (products of groups of rows, sorted by "
            f"expert, or a loop over experts){nearest(graph)}; use ep=1"
        )
    return replace(sharding, layouts=layouts, sequences=tuple(sequences))


def _among(name: str, sequences: Iterable[SequenceSplit]) -> bool:
    return any(name in one.nodes for s in sequences for one in s.dispatched)


def dispatched(
    dims: Dims,
    rule: Rule,
    blocks: Collection[Experts],
    ranks: int,
    parts: Collection[Layout],
    load: Sequence[float] = (),
    *,
    tp: int = 1,
) -> tuple[tuple[Dispatched, ...], dict[Ref, Layout]]:
    """The parts of blocks that run on ranks of experts, and the layouts of their weights; `rule`
    gives the dims of a node by itself, `parts` are the layouts of what the ranks, of each of `tp`,
    have parts of.
    The rows are counted as on the rank that gets most of them, all of which wait for it: of `load`,
    the share of each expert, or else as many on each.

    Raises `ShardError` where there are fewer experts than ranks, or weights that something else
    reads, or that are no parameters, or other numbers of experts and of shares.
    """
    graph = dims.graph
    makers = {n.name: n for n in graph.nodes}
    sizes = set(_numbers([(n.args, n.kwargs) for n in graph.nodes]))
    sizes.update(n for spec in graph.specs().values() for n in spec.shape)
    sizes.update(k for n in tuple(sizes) for k in (n // tp, -(-n // tp)))  # of ranks of tp
    sizes.update(n for lay in set(parts) for r in range(ranks) for n in lay.local_shape(ranks, r))
    found: list[Dispatched] = []
    layouts: dict[Ref, Layout] = {}
    for block in blocks:
        sent = _between(graph, block)
        of_experts = {makers[name].args[1] for name in block.grouped}
        for ref in of_experts:
            layouts |= _layouts_of(dims, rule, makers, ref, ranks)
        own = layouts[next(iter(of_experts))]
        split = next(k for k, dim in enumerate(own.dims) if dim[0].split)
        experts = tuple(own.local_shape(ranks, r)[split] for r in range(ranks))
        read = {r.node for n in graph.nodes if n.name not in sent for r in n.refs}
        exits = frozenset(sent & read)
        if strange := sorted(exits - set(block.grouped)):
            at = makers[strange[0]]
            raise ShardError(f"{at.op} at {at.source} is read beside its experts; use ep=1")
        most = _most(load, experts, makers[next(iter(block.grouped))])
        rows = _rows(sizes, math.ceil(dims.shapes[block.ids][0] * most))
        found.append(Dispatched(sent, exits, block.sorted_rows, block.ends, experts, rows))
    inside = frozenset[str]().union(*(one.nodes for one in found))
    chains = {ref.node for ref in layouts}
    for node in graph.nodes:
        other = next((r for r in node.refs if r in layouts), None)
        if other is not None and node.name not in inside and node.name not in chains:
            raise ShardError(
                f"the experts' weights are read by {node.op} at {node.source} too, which needs "
                "those of all experts; use ep=1"
            )
    return tuple(found), layouts


def _between(graph: Graph, block: Experts) -> frozenset[str]:
    """The products of groups, and what is made of one's rows for another."""
    behind, before = set(block.grouped), set(block.grouped)
    nodes = [n for n in graph.nodes if n.name in block.nodes]
    rows = block.sorted_rows
    for node in nodes:
        if any(r.node in behind for r in node.refs if r in rows):
            behind.add(node.name)
    for node in reversed(nodes):
        if node.name in before:
            before.update(r.node for r in node.refs if r in rows)
    return frozenset(behind & before)


def _layouts_of(
    dims: Dims, rule: Rule, makers: Mapping[str, Node], ref: Ref, ranks: int
) -> Iterator[tuple[Ref, Layout]]:
    """The layouts of weights with a matrix for each expert, and of what they are made of."""
    experts = leaves(dims.of[ref][0])
    inputs = {Ref(i.name): i for i in dims.graph.inputs}

    def is_parameter(ref: Ref) -> bool:
        return ref in inputs and inputs[ref].kind is InputKind.PARAMETER

    while True:
        at = [k for k, dim in enumerate(dims.of[ref]) if leaves(dim) == experts]
        maker = makers.get(ref.node)
        is_stack = maker is not None and maker.op == STACK and given(maker, "dim") == 0
        if len(at) != 1 or not (maker is None or len(maker.refs) == 1 or is_stack):
            break
        if is_stack and at != [0]:
            break
        if (
            maker is not None
            and not is_stack
            and any(
                f.blocked or f.segments
                for f in leaves(rule(maker).of[Ref("node", ref.index)][at[0]])
            )
        ):
            break  # it goes along the experts, as flip and cumsum do
        shape = dims.shapes[ref]
        if shape[at[0]] < ranks:
            raise ShardError(f"ep={ranks}: there are {shape[at[0]]} experts; use as many at most")
        own = Layout(tuple((DimFactor(n, k == at[0]),) for k, n in enumerate(shape)))
        yield ref, own
        if maker is None:
            if is_parameter(ref):
                return
            break
        if is_stack:
            of = maker.args[0]
            if len({*of}) < len(of) or not all(is_parameter(r) for r in of):
                break
            yield from _apart(of, dims, own, ranks)
            return
        ref = maker.refs[0]
    source = makers[ref.node].source if ref.node in makers else ref.node
    raise ShardError(
        f"the experts' weights are made at {source} of more than one parameter, or of those of "
        "other experts, so that no rank can have its own experts' alone; use ep=1"
    )


def _most(load: Sequence[float], experts: Sequence[int], at: Node) -> float:
    """The share of all rows of the rank that gets most."""
    if not load:
        return 1 / len(experts)
    if len(load) != sum(experts):
        raise ShardError(
            f"expert_load has the shares of {len(load)} experts, and the mixture at {at.source} "
            f"has {sum(experts)}; give as many"
        )
    return max(block_sums(load, len(experts)))


def _apart(
    refs: Collection[Ref], dims: Dims, own: Layout, ranks: int
) -> Iterator[tuple[Ref, Layout]]:
    """The layouts of each expert's own parameters, of which `own` is that of the stack: each is
    whole on the rank that has its expert.
    """
    homes = [rank for rank in range(ranks) for _ in range(own.local_shape(ranks, rank)[0])]
    for ref, home in zip(refs, homes, strict=True):
        first, *others = dims.shapes[ref]
        factors = ((DimFactor(n),) for n in others)
        yield ref, Layout(((DimFactor(first, True, on=home),), *factors))


def _rows(sizes: Collection[int], least: int) -> int:
    """The first prime from `least` on of which none of the sizes is a multiple."""
    found = max(least, 3)
    while any(found % k == 0 for k in range(2, int(found**0.5) + 1)) or any(
        n % found == 0 for n in sizes if n
    ):
        found += 1
    return found


def uncut(position: Mapping[str, int], sharding: Sharding) -> tuple[int, ...]:
    """A mark for each node, equal where no stage may end: among rows that were sent to experts,
    whose number no other stage knows, and between what is sent, with the ends of its groups, and
    there.
    """
    found = list(range(len(position)))
    for sequence in sharding.context.sequences if sharding.context else ():
        for one in sequence.dispatched:
            given = {ref.node for ref in (one.ends, *one.sorted_rows)}
            own = [position[name] for name in one.nodes | given if name in position]
            found[min(own) : max(own) + 1] = [min(own)] * (max(own) + 1 - min(own))
    return tuple(found)


def rows_of_experts(graph: Graph) -> frozenset[int]:
    """The sizes that stand for how many rows a rank's experts get."""
    sends = (EXCHANGES[0], STARTS[EXCHANGES[0]])
    return frozenset(int(n.args[-1]) for n in graph.nodes if n.op in sends)


def without_rows(graph: Graph) -> Graph:
    """The graph with calls that take sizes from their arguments, where these are how many rows the
    experts of a rank get, which is not known before they come. Raises `ShardError` where a call
    depends on it otherwise.
    """
    rows = rows_of_experts(graph)
    if not rows:
        return graph
    specs = graph.specs()

    def is_of_rows(value: Any) -> bool:
        return any(n and n % r == 0 for n in _numbers(value) for r in rows)

    nodes = list(graph.nodes)
    for k, node in enumerate(nodes):
        told = node.args[:-1] if node.op in EXCHANGES else node.args
        if not is_of_rows([told, node.kwargs]):
            continue
        if node.op == SLICED and not node.kwargs:
            grad, sizes, dim, *place = node.args
            dim %= len(sizes)
            others = [s for d, s in enumerate(specs[grad].shape) if d != dim]
            kept = [s for d, s in enumerate(sizes) if d != dim] == others
            if kept and not is_of_rows([sizes[dim], place]):
                args = (grad, dim, sizes[dim], *place)
                nodes[k] = replace(node, op="merakc.unslice.default", args=args)
                continue
        raise ShardError(
            f"{node.op} at {node.source} depends on the number of rows that a rank's experts get; "
            "use ep=1"
        )
    return graph.with_nodes(nodes)


def _numbers(value: Any) -> Iterator[int]:
    if isinstance(value, int) and not isinstance(value, bool):
        yield value
    elif isinstance(value, (list, tuple)) and not isinstance(value, Ref):
        for item in value:
            yield from _numbers(item)
