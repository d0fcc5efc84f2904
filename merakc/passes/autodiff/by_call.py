"""Differentiates a graph call by call: of equal calls, of which equal layers are made, once.

Autograd goes through the calls of a trace in the reverse of their order, and adds up gradients as
they arrive. Here that is done call by call, with what autograd makes of each alone, so that the
joint graph is the one that a trace of the whole would be. Calls are equal whose arguments, forms of
tensors and need of gradients are the same.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.fx as fx

from merakc.frontend.calls.elementwise import Form
from merakc.ir.graph import Graph, Input, Node, Ref, map_refs, typed
from merakc.kernels.draws import KEY_POSITION
from merakc.kernels.ops import resolve_op
from merakc.passes.autodiff.tracer import Tracer, inputs_of

ADD = "aten.add.Tensor"
_NOWHERE = Node("", "", (), (), ())


class UnclearError(Exception):
    """What calls make of their arguments cannot be told from the calls alone."""


@dataclass(slots=True, eq=False)
class _Value:
    """A value of the joint graph; `real` is a constant, which has no name before it is read."""

    ref: Ref | None
    form: Form
    trained: bool = False
    real: torch.Tensor | None = None
    gradient: _Value | None = None


@dataclass(frozen=True, slots=True)
class _Calls:
    """Traced calls, and what comes out: the position of an argument or a traced value, with its
    form and whether it has a history; None of what is no tensor.
    """

    nodes: Sequence[Node]
    outs: tuple[tuple[Ref, Form, bool] | int | None, ...]


@dataclass(slots=True)
class _Template:
    """A call as traced, with its backwards by the forms of the gradients of its outputs."""

    calls: _Calls
    leaves: list[torch.Tensor]
    results: list[Any]
    backwards: dict[Any, _Calls] = field(default_factory=dict)


class ByCall:
    """Writes the joint graph of a graph of torch's calls and ours."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.nodes: list[Node] = []
        self.constants: dict[str, torch.Tensor] = {}
        self._names = fx.Graph()._graph_namespace
        self.tracer = Tracer({})
        self.tracer.on_meta = True
        self._known: dict[Any, _Template] = {}
        self._values: dict[Ref, _Value] = {}
        self._tape: list[tuple[Node, _Template, list[_Value], list[_Value | None], _Table]] = []

    def run(self, given: Sequence[Input]) -> None:
        """Goes through the graph."""
        for item in given:
            self._values[Ref(item.name)] = _of_input(item)
        for name, real in self.graph.constants.items():
            self._values[Ref(name)] = _constant(real)
        read = {r for n in self.graph.nodes for r in n.refs} | {o.ref for o in self.graph.outputs}
        for node in self.graph.nodes:
            values = [self._value(r) for r in node.refs]
            outs, template, table = self._call(node, values)
            for ref, out, spec in zip(node.outs, outs, node.outputs, strict=False):
                if out is not None and spec is not None:
                    same = out.form[0] == spec.shape and out.form[3] == spec.dtype
                    # What embedding_bag notes of its bags has other sizes on the meta device.
                    assert same or ref not in read, f"{node} gives {out.form}"
                    self._values[ref] = out
            if any(isinstance(o, tuple) and o[2] for o in template.calls.outs):
                self._tape.append((node, template, values, outs, table))

    def backward(self, reached: Sequence[tuple[Ref, Input]]) -> None:
        """Goes back from these values, of which the inputs are the gradients."""
        for ref, tangent in reached:
            last = self.graph.nodes[-1] if self.graph.nodes else _NOWHERE
            self._add(self._value(ref), _of_input(tangent), last)
        for node, template, values, outs, table in reversed(self._tape):
            made = template.calls.outs
            grads = [
                o.gradient if o is not None and isinstance(m, tuple) and m[2] else None
                for o, m in zip(outs, made, strict=True)
            ]
            if not any(g is not None for g in grads):
                continue
            key = tuple(g and g.form for g in grads)
            calls = template.backwards.get(key)
            if calls is None:
                calls = template.backwards[key] = self._differentiated(template, grads)
            for k, grad in enumerate(grads):
                if grad is not None:
                    table[Ref("gradient", k)] = self.named(grad)
            self._emit(calls.nodes, table, node)
            leaves = [v for v in values if v.trained]
            for value, out in zip(leaves, calls.outs, strict=True):
                if isinstance(out, tuple):
                    self._add(value, _Value(table[out[0]], out[1]), node)
        self._tape.clear()  # of tables, which hold this

    def ref(self, ref: Ref) -> Ref:
        """What a value of the graph is in the joint one."""
        return self.named(self._value(ref))

    def trained(self, ref: Ref) -> bool:
        """Whether a value has a history."""
        return self._value(ref).trained

    def gradient(self, ref: Ref, *, zeros: bool) -> Ref | None:
        """The gradient of an input, if there is one; or else zeros."""
        value = self._value(ref)
        if value.gradient is None and zeros:
            (made,), _, _ = self._made(torch.zeros_like, _NOWHERE, [value])
            return self.named(made) if made is not None else None
        return None if value.gradient is None else self.named(value.gradient)

    @property
    def inputs(self) -> tuple[Input, ...]:
        """The inputs that the constants are."""
        return inputs_of(self.constants)

    # ------------------------------------------------------------------ calls

    def _call(self, node: Node, values: list[_Value]) -> Any:
        """Writes a node: its outputs, the template, and what is what there."""

        def run(*made: torch.Tensor) -> Any:
            given = iter(made)
            args, kwargs = map_refs((node.args, node.kwargs), lambda _: next(given))
            with torch.set_grad_enabled(node.grad):
                return resolve_op(node.op)(*args, **dict(kwargs))

        at = KEY_POSITION.get(node.op, len(node.args))
        told = typed((node.args[:at], node.args[at + 1 :], node.kwargs), lambda _: Ref)
        return self._made(run, node, values, told)

    def _made(
        self, run: Callable[..., Any], node: Node, values: list[_Value], told: Any = None
    ) -> tuple[list[_Value | None], _Template, _Table]:
        """What a function makes of values, by what it made of others of their forms."""
        key = None
        if all(v.real is None or v.form[0] for v in values):  # of a number the value may matter
            key = node.op, told, node.grad, *[(v.form, v.trained) for v in values]
        template = self._known.get(key)
        if template is None:
            template = self._traced(run, values)
            if key is not None:
                self._known[key] = template
        table = _Table(self, values)
        self._emit(template.calls.nodes, table, node)
        outs: list[_Value | None] = []
        for made, result in zip(template.calls.outs, template.results, strict=True):
            if isinstance(made, int):
                outs.append(values[made])
            elif made is None:
                outs.append(None)
            else:
                real = None if result.is_meta else result
                outs.append(_Value(table[made[0]], made[1], made[2], real))
        return outs, template, table

    def _traced(self, run: Callable[..., Any], values: list[_Value]) -> _Template:
        given = [_tensor(v) for v in values]
        with self._tracing({Ref("argument", k): x for k, x in enumerate(given)}) as nodes:
            result = run(*given)
        results = list(result) if isinstance(result, (tuple, list)) else [result]
        outs = tuple(self._out(x, given) for x in results)
        leaves = [x for v, x in zip(values, given, strict=True) if v.trained]
        return _Template(_Calls(nodes, outs), leaves, results)

    def _differentiated(self, template: _Template, grads: list[_Value | None]) -> _Calls:
        seeds = {k: _tensor(g) for k, g in enumerate(grads) if g is not None}
        with self._tracing({Ref("gradient", k): x for k, x in seeds.items()}) as nodes:
            found = torch.autograd.grad(
                [template.results[k] for k in seeds], template.leaves, list(seeds.values()),
                retain_graph=True, allow_unused=True,
            )  # fmt: skip
        return _Calls(nodes, tuple(self._out(x, ()) for x in found))

    @contextmanager
    def _tracing(self, given: dict[Ref, torch.Tensor]) -> Iterator[list[Node]]:
        """While it is entered, calls are traced to the list that it gives."""
        nodes: list[Node] = []
        self.tracer.nodes = nodes
        self.tracer.give(given)
        with self.tracer:
            yield nodes
        if self.tracer.unclear:
            raise UnclearError(self.tracer.unclear)

    def _out(self, x: Any, given: Sequence[torch.Tensor]) -> tuple[Ref, Form, bool] | int | None:
        if not isinstance(x, torch.Tensor):
            return None
        for k, item in enumerate(given):
            if x is item:
                return k
        if x.is_conj() or x.is_neg():
            raise UnclearError("a value that is written otherwise in memory")
        form = tuple(x.shape), x.stride(), int(x.storage_offset()), x.dtype
        return self.tracer.ref(x), form, x.requires_grad

    def _emit(self, calls: Sequence[Node], table: _Table, origin: Node) -> None:
        """Writes traced calls for the values in `table`, which gets what they make."""
        for call in calls:
            args = tuple(
                [table[a] if type(a) is Ref else _now(a, table) if type(a) is tuple else a
                 for a in call.args]
            )  # fmt: skip
            if call.op in KEY_POSITION:
                at = KEY_POSITION[call.op]
                args = (*args[:at], origin.args[KEY_POSITION[origin.op]], *args[at + 1 :])
            name = sys.intern(f"j:{self._names.create_name(_short(call.op), None)}")
            node = Node(name, call.op, args, call.kwargs and _now(call.kwargs, table),
                        call.outputs, module=origin.module, source=origin.source)  # fmt: skip
            self.nodes.append(node)
            table.update(zip(call.outs, node.outs, strict=True))

    def named(self, value: _Value) -> Ref:
        """The name of a value in the joint graph."""
        if value.ref is None:
            assert value.real is not None
            value.ref = Ref(f"traced:_tensor_constant{len(self.constants)}")
            self.constants[value.ref.node] = value.real
        return value.ref

    def _value(self, ref: Ref) -> _Value:
        found = self._values.get(ref)
        if found is None:
            raise UnclearError(f"{ref} is no tensor")
        return found

    def _add(self, value: _Value, gradient: _Value, node: Node) -> None:
        """Adds what a node says of the gradient of a value."""
        before = value.gradient
        if before is not None:
            add = Node("", ADD, (), (), (), module=node.module, source=node.source)
            (total,), _, _ = self._made(torch.add, add, [before, gradient])
            assert total is not None
            gradient = total
        value.gradient = gradient


class _Table(dict[Ref, Ref]):
    """What the values of traced calls are in the joint graph; constants get names as they are
    read.
    """

    def __init__(self, writer: ByCall, values: Sequence[_Value]) -> None:
        super().__init__()
        self._writer, self._values = writer, values

    def __missing__(self, ref: Ref) -> Ref:
        if ref.node == "argument":
            found = self._values[ref.index]
        else:
            found = _constant(self._writer.tracer.constants[ref.node])
        self[ref] = self._writer.named(found)
        return self[ref]


def _now(arg: Any, table: _Table) -> Any:
    if type(arg) is Ref:
        return table[arg]
    return tuple([_now(a, table) for a in arg]) if type(arg) is tuple else arg


@cache
def _short(op: str) -> str:
    return op.split(".")[1]


def _of_input(item: Input) -> _Value:
    shape, dtype = item.spec.shape, item.spec.dtype
    stride = torch.empty(shape, device="meta").stride()
    return _Value(Ref(item.name), (shape, stride, 0, dtype), item.requires_grad)


def _constant(real: torch.Tensor) -> _Value:
    return _Value(None, (tuple(real.shape), real.stride(), 0, real.dtype), real=real)


def _tensor(value: _Value) -> torch.Tensor:
    """A tensor to call with."""
    if value.real is not None and not value.form[0]:
        return value.real
    shape, stride, offset, dtype = value.form
    if not offset:
        made = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    else:
        last = offset + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
        made = torch.empty(last + 1, dtype=dtype, device="meta").as_strided(shape, stride, offset)
    return made.requires_grad_(value.trained)
