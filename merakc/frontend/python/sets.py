"""Forwards that go through sets, whose order is another in each process.

Python orders texts in sets anew in each process, unless all are started with one PYTHONHASHSEED. A
forward with `for kind in set(config.layer_types)` is the same computation in any order, and another
list of calls under other names. Such a recording is brought into the order in which its outputs
need its calls, and names follow that order: all ranks, and the makers of plans, have the same. One
that is not seen to go through a set is told apart where ranks compare what they have recorded.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from types import CodeType
from typing import Any

from torch import nn

from merakc.ir.graph import Graph, InputKind, Node, Ref, map_refs
from merakc.kernels.opaque import OPAQUE

_SETS = frozenset(("set", "frozenset"))
_TORCHS = frozenset(vars(nn.Module()))  # its own bookkeeping
_NUMBERED = re.compile(r"_\d+$")


def goes_through_sets(model: nn.Module) -> bool:
    """Whether a module holds a set of several things, or its code makes one."""
    kinds: dict[Any, None] = dict.fromkeys(map(type, model.modules()))
    return any(map(_makes_sets, kinds)) or any(map(_holds_sets, model.modules()))


def _holds_sets(module: nn.Module) -> bool:
    """Whether it has a set by a name of its own, and not by one that a library's classes have."""
    held = [n for n, x in vars(module).items() if isinstance(x, (set, frozenset)) and len(x) > 1]
    others = [base for base in type(module).__mro__ if base.__module__ != type(module).__module__]
    return any(name not in _TORCHS and not any(hasattr(o, name) for o in others) for name in held)


@cache
def _makes_sets(cls: Any) -> bool:
    """Whether a class names sets in its code, or one that it inherits from in the same file."""
    near = (base for base in cls.__mro__ if base.__module__ == cls.__module__)
    functions = (inspect.unwrap(f) for base in near for f in vars(base).values() if callable(f))
    codes = (f.__code__ for f in functions if hasattr(f, "__code__"))
    return any(not _SETS.isdisjoint(one.co_names) for code in codes for one in _inside(code))


def _inside(code: CodeType) -> Iterator[CodeType]:
    yield code
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield from _inside(one)


def in_needed_order(graph: Graph) -> Graph:
    """The same graph with its calls in the order in which the outputs need them, each behind its
    arguments, of which the one with the longest way from the inputs comes first, so that blocks
    stay together; and with names to match. As it is where modules run as they are, which might do
    more than to compute.
    """
    if any(node.op == OPAQUE for node in graph.nodes):
        return graph
    nodes = _needed(graph)
    constants = {i.name: i for i in graph.inputs if i.kind is InputKind.CONSTANT}
    read = dict.fromkeys(r.node for n in nodes for r in n.refs)
    read |= dict.fromkeys(o.ref.node for o in graph.outputs)
    kept = [i for i in graph.inputs if i.kind is not InputKind.BUFFER and i.name not in constants]
    buffers = {i.name: i for i in graph.inputs if i.kind is InputKind.BUFFER}
    ordered = [buffers[n] for n in read if n in buffers]
    ordered += [buffers[n] for n in sorted(buffers.keys() - read.keys())]
    made = [constants[n] for n in read if n in constants]
    names = _names({i.name for i in (*kept, *ordered)}, [*made, *nodes])

    def now(ref: Ref) -> Ref:
        return Ref(names.get(ref.node, ref.node), ref.index)

    return replace(
        graph,
        inputs=(*kept, *ordered, *(replace(i, name=names[i.name]) for i in made)),
        nodes=tuple(
            replace(
                node, name=names[node.name], args=map_refs(node.args, now),
                kwargs=map_refs(node.kwargs, now),
            )
            for node in nodes
        ),
        outputs=tuple(o.at(now(o.ref)) for o in graph.outputs),
        constants={names[name]: graph.constants[name] for name in read if name in constants},
    )  # fmt: skip


def _needed(graph: Graph) -> list[Node]:
    """The nodes, each behind its arguments: in the order in which a walk back from outputs ends."""
    makers = {node.name: node for node in graph.nodes}
    found: dict[str, Node] = {}
    way: dict[str, int] = {}  # the calls on the longest way from the inputs
    for call in graph.nodes:
        way[call.name] = 1 + max((way.get(r.node, 0) for r in call.refs), default=0)
    for output in graph.outputs:
        waiting = [output.ref.node]
        while waiting:
            node = makers.get(waiting[-1])
            refs = node.refs if node is not None else ()
            missing = [r.node for r in refs if r.node in makers and r.node not in found]
            if missing:
                waiting += sorted(missing, key=way.__getitem__)  # the last is looked at first
                continue
            if node is not None:
                found.setdefault(node.name, node)
            waiting.pop()
    return list(found.values())


def _names(taken: set[str], items: list[Any]) -> Mapping[str, str]:
    """New names, numbered in the order of what they name."""
    counts: dict[str, int] = {}
    found: dict[str, str] = {}
    for item in items:
        base = _NUMBERED.sub("", item.name)
        while True:
            count = counts.get(base, 0)
            counts[base] = count + 1
            name = f"{base}_{count}" if count else base
            if name not in taken:
                break
        found[item.name] = name
    return found
