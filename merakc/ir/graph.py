"""The graph of a step: a pure list of ATen calls on named values, with the user's names kept.

Every value of this module is frozen. A `Graph` has inputs (parameters, buffers, tensors of the
batch, activations that arrive from another stage, ...), nodes in program order, and outputs.
Nothing is mutated: in-place ops of the model appear as their functional forms, and a buffer that
the model writes (BatchNorm's statistics) is an output of kind `BUFFER`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cache
from typing import Any, NamedTuple, TypeVar

import torch

from merakc.ir.same import Same

T = TypeVar("T")
_NODE = operator.itemgetter(0)  # of a `Ref`


class InputKind(StrEnum):
    """Where an input's value comes from."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    CONSTANT = "constant"  # a tensor made in Python during the recording
    BATCH = "batch"  # a tensor of the example batch
    ACTIVATION = "activation"  # a value of another pipeline stage
    TANGENT = "tangent"  # the gradient of an output, given to the backward
    SAVED = "saved"  # a value kept from an earlier piece of the same stage
    SCALAR = "scalar"  # a number of the step that the runtime fills in (loss weights, seeds)
    KNOWN = "known"  # a value of the batch alone, computed before the step for the whole of it


class OutputKind(StrEnum):
    """What an output is for."""

    LOSS = "loss"
    RESULT = "result"  # any other leaf of what the user's forward returns
    BUFFER = "buffer"  # the new value of a buffer
    ACTIVATION = "activation"  # a value that another pipeline stage reads
    GRADIENT = "gradient"
    SAVED = "saved"  # kept for a later piece of the same stage
    WAIST = "waist"  # what the head, which runs once for the whole batch, reads of each part
    ASIDE = "aside"  # of the batch alone, and no part of what the forward returns

    @property
    def begins_gradients(self) -> bool:
        """Whether it is the loss, or what the loss of the whole batch is made of."""
        return self in (OutputKind.LOSS, OutputKind.WAIST)


# Calls that read an argument's shape and not its values.
VALUELESS = frozenset(
    f"{kind}{name}"
    for kind, names in {
        "new_": ("empty", "empty_strided", "full", "ones", "zeros"),
        "": ("empty_like", "full_like", "ones_like", "zeros_like"),
    }.items()
    for name in names
)


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.float32` -> "float32"."""
    return str(dtype).removeprefix("torch.")


class TensorSpec(NamedTuple):
    """Shape and dtype of a value; on a sharded graph, of one rank's part."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Bytes of a contiguous tensor of this shape."""
        return self.numel * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{dtype_name(self.dtype)}[{','.join(map(str, self.shape))}]"


class Ref(NamedTuple):
    """The `index`-th output of the node `node`, or the input of that name.

    A tuple, since Python compares and hashes those without running code of ours: every pass looks
    values up by the million.
    """

    node: str
    index: int = 0  # type: ignore[assignment]  # hides what finds an element of a tuple

    def __str__(self) -> str:
        return f"%{self.node}" if self.index == 0 else f"%{self.node}:{self.index}"


@dataclass(frozen=True, slots=True)
class Input:
    """A value that the graph is given. `target` is the user's name of it (`model.norm.weight`)."""

    name: str
    kind: InputKind
    spec: TensorSpec
    target: str = ""
    requires_grad: bool = False

    @property
    def key(self) -> str:
        """The name under which a micro-batch holds it between two pieces of a stage."""
        return self.target if self.kind in (InputKind.SAVED, InputKind.TANGENT) else self.name


@dataclass(frozen=True, slots=True)
class Node:
    """One call. `args` and `kwargs` hold `Ref`s, numbers, strings, dtypes and tuples of them."""

    name: str
    op: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    outputs: tuple[TensorSpec | None, ...]
    module: str = ""
    source: str = ""
    grad: bool = True  # False: recorded while gradients were switched off
    _refs: tuple[Ref, ...] | None = field(default=None, init=False, repr=False, compare=False)
    _outs: tuple[Ref, ...] | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def refs(self) -> tuple[Ref, ...]:
        """The values read, in order of appearance, repeats kept."""
        refs = self._refs
        if refs is None:  # every pass asks each node, many times
            found: list[Ref] = []
            _collect(self.args, found)
            _collect(self.kwargs, found)
            refs = tuple(found)
            object.__setattr__(self, "_refs", refs)
        return refs

    def reading(self, args: tuple[Any, ...], kwargs: Any = None) -> Node:
        """The same call with other arguments."""
        kwargs = self.kwargs if kwargs is None else kwargs
        made = Node(self.name, self.op, args, kwargs, self.outputs,
                    module=self.module, source=self.source, grad=self.grad)  # fmt: skip
        object.__setattr__(made, "_outs", self._outs)
        return made

    @property
    def spec(self) -> TensorSpec:
        """The first output."""
        first = self.outputs[0]
        assert first is not None, f"{self.name} has no tensor output"
        return first

    @property
    def outs(self) -> tuple[Ref, ...]:
        """The outputs, those that are no tensors too."""
        outs = self._outs
        if outs is None:
            outs = tuple([tuple.__new__(Ref, (self.name, k)) for k in range(len(self.outputs))])
            object.__setattr__(self, "_outs", outs)
        return outs

    @property
    def made(self) -> tuple[Ref, ...]:
        """The values made."""
        if None not in self.outputs:
            return self.outs
        return tuple([ref for ref, o in zip(self.outs, self.outputs, strict=True) if o is not None])

    def grad_outputs(self, grads: Set[Ref]) -> list[Ref]:
        """The outputs that require a gradient where the values in `grads` do."""
        if not self.grad or grads.isdisjoint(self.refs) or _cuts(self.op):
            return []
        return [
            ref
            for ref, s in zip(self.outs, self.outputs, strict=True)
            if s is not None and (s.dtype.is_floating_point or s.dtype.is_complex)
        ]

    def __str__(self) -> str:
        parts = [format_arg(a) for a in self.args]
        parts += [f"{k}={format_arg(v)}" for k, v in self.kwargs]
        outs = ", ".join("none" if o is None else str(o) for o in self.outputs)
        text = f"%{self.name}: {outs} = {self.op}({', '.join(parts)})"
        return text if self.grad else text + " no_grad"


@dataclass(frozen=True, slots=True)
class Output:
    """A value that leaves the graph. `name` is the user's path of it, or the value's own name."""

    name: str
    kind: OutputKind
    ref: Ref

    def at(self, ref: Ref) -> Output:
        """The same output, taken from another value."""
        return Output(self.name, self.kind, ref)


@dataclass(frozen=True, slots=True)
class Graph:
    """Inputs, nodes in a valid order of execution, outputs.

    `constants` and `functions` are what the nodes need and a text form cannot hold: tensors made
    during the recording, by input name, and Python callables (custom `autograd.Function`s), by op.
    """

    inputs: tuple[Input, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Output, ...]
    constants: Mapping[str, torch.Tensor] = field(default_factory=dict, compare=False)
    functions: Mapping[str, Callable[..., Any]] = field(default_factory=dict, compare=False)
    _told: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def told(self, of: Callable[..., T], *options: Hashable) -> T:
        """What a pure function says of the graph, and of these options, computed once."""
        key = (of, *options) if options else of
        if key not in self._told:
            self._told[key] = of(self, *options)
        found: T = self._told[key]
        return found

    def verify(self) -> None:
        """Asserts that names are unique and that every value is defined before it is read."""
        defined: dict[str, int] = {}
        for item in self.inputs:
            assert item.name not in defined, f"input {item.name} appears twice"
            defined[item.name] = 1
        for node in self.nodes:
            for ref in node.refs:
                assert ref.node in defined, f"{node.name} reads {ref}, which is not defined yet"
                assert ref.index < defined[ref.node], f"{node.name} reads {ref}: no such output"
            assert node.name not in defined, f"node {node.name} appears twice"
            defined[node.name] = len(node.outputs)
        for out in self.outputs:
            assert out.ref.node in defined, f"output {out.name} reads {out.ref}, not defined"
            assert out.ref.index < defined[out.ref.node], f"output {out.name}: no {out.ref}"

    def specs(self) -> Mapping[Ref, TensorSpec]:
        """The spec of every value."""
        return self.told(_specs)

    def users(self) -> Mapping[str, Sequence[Node]]:
        """The nodes that read each input or node, in program order, each once."""
        return self.told(_users)

    def grad_values(self) -> frozenset[Ref]:
        """The values that depend on an input requiring a gradient, through differentiable calls."""
        return self.told(_grad_values)

    def with_nodes(self, nodes: Sequence[Node]) -> Graph:
        """The graph with these nodes: itself, with what it was told, where it has just these."""
        same = len(nodes) == len(self.nodes) and all(map(operator.is_, nodes, self.nodes))
        return self if same else replace(self, nodes=tuple(nodes))

    def pruned(self) -> Graph:
        """The graph without the nodes that no output needs; inputs stay."""
        needed = {o.ref.node for o in self.outputs}
        kept = []
        for node in reversed(self.nodes):
            if node.name in needed:
                kept.append(node)
                needed.update(map(_NODE, node.refs))
        return self.with_nodes(kept[::-1])

    def without_unread_inputs(self) -> Graph:
        """The graph with only those inputs and constants that a node or an output reads."""
        read = {r.node for n in self.nodes for r in n.refs} | {o.ref.node for o in self.outputs}
        return replace(
            self,
            inputs=tuple(i for i in self.inputs if i.name in read),
            constants={name: c for name, c in self.constants.items() if name in read},
        )

    def renamed(self, names: Mapping[Ref, Ref]) -> Graph:
        """The graph with some of the values that it reads replaced."""
        if not names:
            return self

        def now(ref: Ref) -> Ref:
            return names.get(ref, ref)

        nodes = tuple(
            n
            if names.keys().isdisjoint(n.refs)
            else n.reading(map_refs(n.args, now), map_refs(n.kwargs, now))
            for n in self.nodes
        )
        outputs = tuple(o.at(now(o.ref)) for o in self.outputs)
        return Graph(self.inputs, nodes, outputs, self.constants, self.functions)

    def without_nodes(self, same: Same | None = None) -> Graph:
        """What goes in and out of it, by names, and the functions that it calls: all that is asked
        of a graph that is compiled; the `same` values as others have.
        """
        inputs, outputs = self.inputs, self.outputs
        if same is not None:
            fixed = (InputKind.PARAMETER, InputKind.BUFFER)  # of one shape in all graphs
            inputs = tuple([same(i) if i.kind in fixed else i for i in inputs])
            outputs = same(outputs)
        return Graph(inputs, (), outputs, functions=self.functions)

    def __str__(self) -> str:
        lines = [f"{i.kind} %{i.name}: {i.spec} {i.target}".rstrip() for i in self.inputs]
        lines += [str(n) for n in self.nodes]
        lines += [f"{o.kind} {o.name} = {o.ref}" for o in self.outputs]
        return "\n".join(lines)


def _specs(graph: Graph) -> Mapping[Ref, TensorSpec]:
    found = {Ref(i.name): i.spec for i in graph.inputs}
    for node in graph.nodes:
        if len(node.outputs) == 1 and node.outputs[0] is not None:  # as of most
            found[node.outs[0]] = node.outputs[0]
        else:
            found |= {ref: s for ref in node.made if (s := node.outputs[ref.index])}
    return found


@cache
def _cuts(op: str) -> bool:
    """Whether no gradient passes a call."""
    return ".detach" in op or op.split(".")[1] in VALUELESS


def _users(graph: Graph) -> Mapping[str, Sequence[Node]]:
    found: dict[str, list[Node]] = {i.name: [] for i in graph.inputs}
    for node in graph.nodes:
        found[node.name] = []
        for name in {*map(_NODE, node.refs)}:
            found[name].append(node)
    return found


def _grad_values(graph: Graph) -> frozenset[Ref]:
    found = {Ref(i.name) for i in graph.inputs if i.requires_grad}
    for node in graph.nodes:
        found.update(node.grad_outputs(found))
    return frozenset(found)


def iter_refs(value: Any) -> Iterator[Ref]:
    """Every `Ref` in a nest of tuples."""
    found: list[Ref] = []
    _collect((value,), found)
    return iter(found)


def _collect(value: tuple[Any, ...], found: list[Ref]) -> None:
    """Adds every `Ref` in a nest of tuples, in order."""
    for item in value:
        if type(item) is Ref:
            found.append(item)
        elif isinstance(item, tuple):
            _collect(item, found)


def map_refs(value: Any, change: Callable[[Ref], Any]) -> Any:
    """The same nest of tuples with every `Ref` replaced."""
    if type(value) is Ref:
        return change(value)
    if not isinstance(value, tuple):
        return value
    return tuple(
        [change(v) if type(v) is Ref else map_refs(v, change) if isinstance(v, tuple) else v
         for v in value]
    )  # fmt: skip


def typed(value: Any, ref: Callable[[Ref], Any] = lambda r: r) -> Any:
    """An argument to compare with others, with types: 1 is equal to 1.0 and to True."""
    if type(value) is Ref:
        return ref(value)
    kind = type(value)
    if kind is tuple:
        return tuple([typed(v, ref) for v in value])
    return kind, repr(value) if kind is float else value


def format_arg(value: Any) -> str:
    """The text form of an argument."""
    if isinstance(value, Ref):
        return str(value)
    if isinstance(value, tuple):
        return "(" + ", ".join(map(format_arg, value)) + ")"
    return dtype_name(value) if isinstance(value, torch.dtype) else repr(value)
