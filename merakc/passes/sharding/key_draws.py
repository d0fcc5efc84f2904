"""Guesses of every random draw which dim counts the samples, so that a sample draws by its number.

Samples keep their numbers however the batch is divided, so that micro-batches of any size on any
number of data-parallel ranks draw what one process draws for the whole batch. Of a tensor drawn
from nothing, in which samples are joined with heads or views, what it meets says where they stand:
the factors of the sharding rules reach a drop-path's mask through the product with the value that
it masks. It is no more than a guess: the algebra of batches settles each draw, and where a value
meets it otherwise, that couples (`merakc.passes.batches`).
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace

from merakc.ir.graph import Graph, InputKind, Node, Ref
from merakc.kernels.draws import KEY_POSITION
from merakc.passes.sharding.dims import Dims
from merakc.passes.sharding.factors import Factor, leaves
from merakc.passes.sharding.propagate import propagate

Keying = tuple[int, tuple[int, ...]]
"""Which dim of an array of these sizes counts samples (-1: none); its elements are the value's."""


def has_draws(graph: Graph) -> bool:
    """Whether anything in the graph is random."""
    return any(n.op in KEY_POSITION for n in graph.nodes)


def key_draws(graph: Graph, sampled: Collection[str]) -> Graph:
    """The graph with the keying of its draws filled in.

    `sampled` names the tensors of the batch that are split into micro-batches, along dim 0, of two
    samples and more.
    """
    if not has_draws(graph):
        return graph
    inputs = [i for i in graph.inputs if i.kind is InputKind.BATCH and i.target in sampled]
    size = inputs[0].spec.shape[0] if inputs else 0
    dims = propagate(graph)
    names = {i.name for i in inputs}
    samples = sample_factors(dims, names)
    depends = _depending(graph, names)
    found = {
        n.name: _keying(
            [f for dim in dims.of[Ref(n.name)] for f in leaves(dim)],
            samples, n.spec.shape, size, any(r.node in depends for r in n.refs),
            from_nothing=n.op != "merakc.dropout.default",
        )
        for n in _draws(graph)
    }  # fmt: skip
    nodes = tuple(_keyed(n, found[n.name]) if n.name in found else n for n in graph.nodes)
    return replace(graph, nodes=nodes)


def _draws(graph: Graph) -> list[Node]:
    return [n for n in graph.nodes if n.op in KEY_POSITION]


def _depending(graph: Graph, names: Collection[str]) -> set[str]:
    """The names of the values that depend on these inputs."""
    found = set(names)
    for node in graph.nodes:
        if any(r.node in found for r in node.refs):
            found.add(node.name)
    return found


def sample_factors(dims: Dims, names: Collection[str]) -> set[Factor]:
    """The factors of dim 0 of these inputs, and of what ops without a rule make of it."""
    found = {f for name in names for f in leaves(dims.of[Ref(name)][0])}
    for node in dims.graph.nodes:
        given = {f for ref in node.refs for dim in dims.of[ref] for f in leaves(dim)}
        for index in range(len(node.outputs)):
            out = Ref(node.name, index)
            for ref in node.refs if out in dims.of else ():
                shape, own = dims.shapes[out], dims.shapes[ref]
                for k in range(len(shape) if shape == own else shape[:1] == own[:1]):
                    before, after = leaves(dims.of[ref][k]), leaves(dims.of[out][k])
                    if before and found.issuperset(before) and given.isdisjoint(after):
                        found.update(after)
    return found


def _keying(
    factors: list[Factor],
    samples: Collection[Factor],
    shape: tuple[int, ...],
    size: int,
    depends: bool,
    *,
    from_nothing: bool,
) -> Keying:
    """The keying of a value with these factors, for micro-batches of `size` samples."""
    first = next((k for k, f in enumerate(factors) if f in samples), len(factors))
    last, inside = first, 1
    while last < len(factors) and factors[last] in samples and inside < size:
        inside *= factors[last].size
        last += 1
    if first < last and inside == size:
        before = math.prod(f.size for f in factors[:first])
        after = math.prod(f.size for f in factors[last:])
        return (1, (before, size, after)) if before > 1 else (0, (size, after))
    numel = math.prod(shape)
    if not depends and not from_nothing:
        return -1, (numel,)
    if shape and shape[0] == size:
        return 0, (size, numel // size)
    return (0, (1, numel)) if depends else (-1, (numel,))


def _keyed(node: Node, keying: Keying) -> Node:
    sample, sizes = keying
    at = KEY_POSITION[node.op] + 1
    starts = (0,) * len(sizes)
    return replace(node, args=(*node.args[:at], sample, sizes, starts, sizes, *node.args[at + 4 :]))
