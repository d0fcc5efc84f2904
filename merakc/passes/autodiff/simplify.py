"""Removes what a traced graph does for nothing: bookkeeping, views undone again, repeated calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from merakc.ir.graph import Graph, Node, Ref, TensorSpec, map_refs, typed

# Nodes that hand their input on: autograd's bookkeeping, and the forward half of f/g pairs.
FORWARDED = frozenset(
    {"aten.detach.default", "aten.alias.default", "aten.lift_fresh_copy.default",
     "merakc.copy_to.default", "merakc.divide_gradient.default"}
)  # fmt: skip
RESHAPES = frozenset({"aten.view.default", "aten._unsafe_view.default", "aten.reshape.default"})
SWAPS = frozenset({"aten.t.default", "aten.transpose.int"})  # undone by being done again
VIEWS = RESHAPES | SWAPS
CAT, SLICE = "aten.cat.default", "aten.slice.Tensor"


def simplify(graph: Graph) -> Graph:
    """The same function with forwarding nodes gone, equal calls merged, dead nodes removed.

    A reshape of a reshape reads the first one's argument, and a view that gives back what it was
    given (a transpose undone, an expansion to the same shape) goes. So does a `cat` of one tensor
    and of empty ones, as caches of keys and values make, but where callers get it: they may go by
    its strides.

    Every op of a traced graph is a pure function of its arguments, so that two calls alike give
    one value. Collectives are merged too: all ranks of a group run the same graph.
    """
    replaced: dict[Ref, Ref] = {}
    seen: dict[Any, list[Node]] = {}
    nodes: list[Node] = []
    views: dict[Ref, Node] = {}
    specs = graph.specs()
    given_out = {o.ref for o in graph.outputs}

    def now(ref: Ref) -> Ref:
        return replaced.get(ref, ref)

    for node in graph.nodes:
        args, kwargs = node.args, node.kwargs
        if not replaced.keys().isdisjoint(node.refs):
            args, kwargs = map_refs(args, now), map_refs(kwargs, now)
        if node.op in RESHAPES and args[0] in views and views[args[0]].op in RESHAPES:
            args = (views[args[0]].args[0], *args[1:])
        if node.op in FORWARDED or _gives_back(node, args, specs):
            replaced[Ref(node.name)] = args[0]
            continue
        if node.op == CAT and Ref(node.name) not in given_out and _is_one(node, args[0], specs):
            replaced[Ref(node.name)] = next(part for part in args[0] if specs[part].numel)
            continue
        if node.op in SWAPS and args[0] in views and _undoes(node, args, views[args[0]]):
            replaced[Ref(node.name)] = views[args[0]].args[0]
            continue
        alike = seen.setdefault((node.op, args, kwargs), [])
        same = next((n for n in alike if _same_types(n, args, kwargs)), None)
        if same is not None:
            for index in range(len(node.outputs)):
                replaced[Ref(node.name, index)] = Ref(same.name, index)
            continue
        as_it_is = args is node.args and kwargs is node.kwargs and node.grad
        nodes.append(node if as_it_is else _traced(node, args, kwargs))
        alike.append(nodes[-1])
        if node.op in VIEWS:
            views[Ref(node.name)] = nodes[-1]
    outputs = tuple(o.at(now(o.ref)) for o in graph.outputs)
    return Graph(graph.inputs, tuple(nodes), outputs, graph.constants, graph.functions).pruned()


def _same_types(node: Node, args: Any, kwargs: Any) -> bool:
    """Whether arguments that are equal to a node's are of the same types, too."""
    return bool(typed((node.args, node.kwargs)) == typed((args, kwargs)))


def _traced(node: Node, args: Any, kwargs: Any) -> Node:
    """The call with these arguments; whether gradients were on says nothing behind autograd."""
    return Node(
        node.name, node.op, args, kwargs, node.outputs, module=node.module, source=node.source
    )


def _gives_back(node: Node, args: tuple[Any, ...], specs: Mapping[Ref, TensorSpec]) -> bool:
    """Whether a view, a slice or a cast changes neither shape nor dtype."""
    kept = node.op in RESHAPES or node.op in ("aten.expand.default", "aten._to_copy.default", SLICE)
    return kept and specs[args[0]] == node.spec


def _is_one(node: Node, parts: tuple[Ref, ...], specs: Mapping[Ref, TensorSpec]) -> bool:
    """Whether a `cat` has one part that is not empty, of its own form."""
    full = [specs[part] for part in parts if specs[part].numel]
    return full == [node.spec]


def _undoes(node: Node, args: tuple[Any, ...], before: Node) -> bool:
    """Whether a transpose swaps back what the one before it swapped."""
    rank = len(node.spec.shape)
    return node.op == before.op and (
        node.op == "aten.t.default"
        or {d % rank for d in args[1:3]} == {d % rank for d in before.args[1:3]}
    )
