"""Graphs for tools of other people: networkx for whoever inspects one, torch.fx to run one."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from merakc.errors import ConfigError
from merakc.ir.graph import Graph, InputKind, Node, Ref, TensorSpec, map_refs
from merakc.kernels.ops import resolve_op

if TYPE_CHECKING:
    import networkx as nx
    from torch import fx

HELD = (Ref, type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.layout,
        torch.memory_format)  # fmt: skip
Attributes = Mapping[str, str | int | float]


def to_networkx(
    graph: Graph,
    nodes: Mapping[str, Attributes] = {},
    values: Mapping[Ref, Attributes] = {},
) -> nx.MultiDiGraph[str]:
    """The graph with a node for each input, call and output, and an edge for each reading.

    An edge is keyed by the place of the value among those that its reader takes. Attributes are
    texts and numbers, so that node-link JSON and GraphML hold them: of a node `kind`, `op`,
    `module`, `source`, `shape`, `dtype`, `bytes`, of an edge the value's `shape`, `dtype`, `bytes`
    and `source`, the line that made it. `nodes` and `values` say more, by a call's name and by a
    value.
    """
    import networkx as nx  # which takes as long to import as all of merakc's graphs

    found: nx.MultiDiGraph[str] = nx.MultiDiGraph()
    specs, lines = graph.specs(), {n.name: n.source for n in graph.nodes}
    for item in graph.inputs:
        own = {"kind": str(item.kind), "op": "input", "module": item.target, "source": ""}
        found.add_node(item.name, **own, **_described(item.spec), **nodes.get(item.name, {}))
    for node in graph.nodes:
        first = next((o for o in node.outputs if o is not None), None)
        facts = {"kind": "call", "op": node.op, "module": node.module, "source": node.source}
        found.add_node(node.name, **facts, **_described(first), **nodes.get(node.name, {}))
        for place, ref in enumerate(node.refs):
            _read(found, ref, node.name, place=place, specs=specs, lines=lines, values=values)
    for out in graph.outputs:
        name = f"output {out.name}"
        own = {"kind": str(out.kind), "op": "output", "module": out.name, "source": ""}
        found.add_node(name, **own, **_described(specs.get(out.ref)))
        _read(found, out.ref, name, place=0, specs=specs, lines=lines, values=values)
    return found


def _read(
    found: nx.MultiDiGraph[str],
    ref: Ref,
    reader: str,
    place: int,
    specs: Mapping[Ref, TensorSpec],
    lines: Mapping[str, str],
    values: Mapping[Ref, Attributes],
) -> None:
    own = {"value": str(ref), "source": lines.get(ref.node, ""), **_described(specs.get(ref))}
    found.add_edge(ref.node, reader, key=place, **own, **values.get(ref, {}))


def _described(spec: TensorSpec | None) -> dict[str, str | int]:
    """What is said of a value; nothing of a number."""
    if spec is None:
        return {"shape": "", "dtype": "", "bytes": 0}
    dtype, _, shape = str(spec).partition("[")
    size = spec.size_bytes if all(isinstance(n, int) for n in spec.shape) else 0
    return {"shape": f"[{shape}", "dtype": dtype, "bytes": size}


def to_fx(graph: Graph) -> fx.GraphModule:
    """The graph as a module of torch.fx that runs.

    It takes the inputs that are no constants, and gives the outputs, both in their order. Raises
    `ConfigError` for a graph whose sizes depend on values, which torch.fx does not hold.
    """
    from torch import fx

    root, made = nn.Module(), fx.Graph()
    values: dict[Ref, fx.Node] = {}
    for place, item in enumerate(graph.inputs):
        name = re.sub(r"\W", "_", f"{item.target or item.name}")
        if item.kind is InputKind.CONSTANT:
            root.register_buffer(f"constant_{place}", graph.constants[item.name])
            values[Ref(item.name)] = made.get_attr(f"constant_{place}")
        else:
            values[Ref(item.name)] = made.placeholder(f"arg{place}_{name}")
    grad = True
    for node in graph.nodes:
        if node.grad != grad:
            made.call_function(torch._C._set_grad_enabled, (node.grad,))
            grad = node.grad
        _call(made, graph, node, values)
    if not grad:
        made.call_function(torch._C._set_grad_enabled, (True,))
    made.output(tuple(values[o.ref] for o in graph.outputs))
    return fx.GraphModule(root, made)


def _leaves(value: Any) -> Iterator[Any]:
    """What stands in a nest of tuples."""
    if isinstance(value, tuple) and not isinstance(value, Ref):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


def _call(made: fx.Graph, graph: Graph, node: Node, values: dict[Ref, fx.Node]) -> None:
    """Writes a call, and what is taken of its result."""
    own = graph.functions.get(node.op)
    target = own or resolve_op(node.op)
    if own is not None and not hasattr(own, "__name__"):
        raise ConfigError(f"{node.source}: torch.fx cannot hold a call of {own!r}, without a name")
    if odd := [x for x in _leaves((node.args, node.kwargs)) if not isinstance(x, HELD)]:
        raise ConfigError(
            f"{node.source}: torch.fx cannot hold {node.op} of {odd[0]!r}, which only values say; "
            "export a graph whose sizes are known"
        )
    args, kwargs = map_refs((node.args, node.kwargs), values.__getitem__)
    call = made.call_function(target, args, dict(kwargs))
    several = len(node.outputs) > 1
    if own is None:
        returns = target._schema.returns  # type: ignore[attr-defined]
        several |= (
            len(returns) > 1 or "[]" in str(returns[0].type) or "List" in str(returns[0].type)
        )
    for k in range(len(node.outputs)):
        taken = made.call_function(operator.getitem, (call, k)) if several else call
        values[Ref(node.name, k)] = taken
