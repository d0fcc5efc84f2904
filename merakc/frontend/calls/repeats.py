"""Calls that are written as an earlier one of their recording was: equal layers make them.

What the recorder does with a call follows from the op, the forms of its arguments and the numbers
among them. Of one that is like an earlier one just the results, the node and its aliases are made.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from merakc.frontend.aliases import Aliases
from merakc.frontend.calls.draws import ASKED
from merakc.frontend.calls.forms import Forms, Results, is_like_others, op_name, tensors_of
from merakc.frontend.calls.normalise import without_places
from merakc.ir.graph import Node, Ref, TensorSpec, typed

# Calls of which more matters: whether an argument requires a gradient, or what is known of it.
BY_VALUE = ASKED | {"aten.detach.default"}
Specs = tuple[TensorSpec | None, ...]


@dataclass(frozen=True, slots=True)
class Ways:
    """What a recorder does: it says what arguments are in the graph, writes calls, adds nodes."""

    given: Callable[[Any], Any]
    call: Callable[[Any, Any, dict[str, Any]], Any]
    add: Callable[[str, Any, dict[str, Any], Specs], Ref]


@dataclass(frozen=True, slots=True)
class _Written:
    """As what a call was written: the op of its node and what it returns. Without specs it is no
    node, and gives its first argument back.
    """

    op: str
    results: Results
    specs: Specs


class Repeats:
    """Writes calls that are like others of their recording, of which `nodes` are the nodes."""

    def __init__(self, forms: Forms, aliases: Aliases, nodes: Sequence[Node], ways: Ways) -> None:
        self._forms, self._aliases, self._nodes, self._ways = forms, aliases, nodes, ways
        self._known: dict[Hashable, _Written] = {}
        self._ops: set[Any] = set()  # of these

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a call returns, which is then in the graph; `NotImplemented` of one that is new."""
        if func not in self._ops:
            return NotImplemented
        call = self._known.get(self._forms.key(func, args, kwargs))
        if call is None:
            return NotImplemented
        if not call.specs:
            return args[0]
        outs, given = self._forms.made(call.results, args), self._ways.given(tuple(args))
        named = self._ways.given(without_places(kwargs))
        ref = self._ways.add(call.op, given, named, call.specs)
        views = [view for _, view in call.results.forms]
        for index, (out, view, spec) in enumerate(zip(outs, views, call.specs, strict=True)):
            here = Ref(ref.node, index)
            parent = self._aliases.find(args[0]) if view else None
            if parent is None:
                self._aliases.add(out, here, spec=spec)
            else:
                self._aliases.add_view(out, here, parent, call.op, given[1:])
        kind = call.results.kind
        return outs[0] if kind is None else kind(outs)

    def first(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a new call returns. Notes as what it was written, if that is a node of the call's
        own arguments, or none of a call that gives its first one back.
        """
        before = len(self._nodes)
        out = self._ways.call(func, args, kwargs)
        nodes = self._nodes[before:]
        tensors = tensors_of((args, tuple(kwargs.values())))
        if len(nodes) > 1 or op_name(func) in BY_VALUE or not all(map(is_like_others, tensors)):
            return out
        key = self._forms.key(func, args, kwargs)
        results, op, specs = self._forms.known(key), "", Specs()
        if results is not None and nodes:
            node, given = nodes[0], self._ways.given
            own = given(tuple(args)), tuple(given(without_places(kwargs)).items())
            if typed((node.args, node.kwargs)) != typed(own):
                return out
            op, specs = node.op, node.outputs
        if results and len(results.forms) == len(specs) and (specs or results.kind is None):
            self._known[key] = _Written(op, results, specs)
            self._ops.add(func)
        return out
