"""Graphs of a stage through torch's code generator: runs of calls become kernels of their own.

Collectives, what starts and waits for them, modules that run as they are and users' own ops stay
where they stand, in their order; every run of calls between two of them is one node, which
`torch._inductor` compiles for the layouts of what it is first called with. Runs that are alike,
as those of equal layers are, share one function.
"""

from __future__ import annotations

import inspect
import operator
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from itertools import groupby
from typing import Any, cast

import torch
import torch.fx as fx

from merakc.analysis.aliases import owned_outputs
from merakc.errors import ConfigError
from merakc.ir.graph import (
    Graph,
    Input,
    InputKind,
    Node,
    Output,
    OutputKind,
    Ref,
    TensorSpec,
    map_refs,
)
from merakc.ir.recompute import run_of
from merakc.kernels.ops import DIRECT, FUSED, makes_tensor, resolve_op, returns_list

# Empties the list that it is given: a value is let go of after its last reader.
Function = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]
# What the code generator calls as it is, beside all ops of ATen.
CALLED = frozenset(
    f"merakc.{name}.default"
    for name in ("attention", "attention_backward", "dropout", "uniform", "normal")
)

# Those whose ways to their kernels are traced: on a CPU a call of the op takes as long as of the
# kernel of a small layer.
TRACED = frozenset({"merakc.attention.default", "merakc.attention_backward.default"})


def check_compiler(device: torch.device) -> None:
    """Raises `ConfigError` where nothing here compiles kernels for the device."""
    from torch._inductor.cpp_builder import get_cpp_compiler  # takes a second
    from torch._inductor.exc import InvalidCxxCompiler
    from torch.utils._triton import has_triton

    if device.type == "cpu":
        try:
            get_cpp_compiler()
        except InvalidCxxCompiler as error:
            raise ConfigError(
                f"compile=True needs a C++ compiler for the kernels of {device}: {error}; install "
                "g++ or clang, name one in the environment variable CXX, or leave compile away"
            ) from error
    elif not has_triton():
        raise ConfigError(
            f"compile=True needs Triton for the kernels of {device}, which is missing or does not "
            "support this GPU; install triton, or leave compile away"
        )


class Fuser:
    """Fuses graphs for one device; equal runs of all its graphs share a function."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.known: dict[str, Fused] = {}

    def fuse(self, graph: Graph) -> Graph:
        """The same function, each run of calls that can be fused being one node.

        The functions of these nodes are in `functions`, by op.
        """
        specs, runs = graph.specs(), list(_runs(graph.nodes))
        home = {node.name: k for k, run in enumerate(runs) for node in run}
        wanted = {r for n in graph.nodes for r in n.refs if home.get(r.node) != home[n.name]}
        wanted |= {o.ref for o in graph.outputs}
        nodes: list[Node] = []
        names: dict[Ref, Ref] = {}
        functions = dict(graph.functions)
        for run in runs:
            if not _fuses(run[0]):
                nodes += run
                continue
            made = [Ref(n.name, k) for n in run for k in range(len(n.outputs))]
            made = [ref for ref in made if ref in wanted]
            part, given = _part(run, made, {r: specs[r] for n in run for r in n.refs})
            name = f"{FUSED}{len(functions)}"
            functions[name] = self.known.setdefault(str(part), Fused(part, self.device))
            nodes.append(Node(name, name, given, (), tuple(specs[r] for r in made)))
            names |= {ref: Ref(name, k) for k, ref in enumerate(made)}
        return replace(graph, nodes=tuple(nodes), functions=functions).renamed(names)


class Fused:
    """The function of a run of calls, for each layout of what it is called with."""

    def __init__(self, part: Graph, device: torch.device) -> None:
        self.part, self.device = part, device
        self.made: dict[tuple[tuple[int, ...], ...], Function] = {}

    def __call__(self, given: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The values of the run's outputs. The list is emptied, as `compile_graph` does."""
        layout = tuple([x.stride() for x in given])
        function = self.made.get(layout)
        if function is None:
            function = self.made[layout] = self._compile(given)
        return function(given)

    def _compile(self, given: Sequence[torch.Tensor]) -> Function:
        module = to_fx(self.part, self.device)
        with torch.no_grad(), warnings.catch_warnings(), _no_checks_of_layouts():
            warnings.simplefilter("ignore", DeprecationWarning)  # torch's, of its own modules
            function = _emptying(torch._inductor.compile(module, list(given)))
            shared = _shared(self.part, given, function(list(given)))
        if not shared:
            return function

        def apart(now: list[torch.Tensor]) -> Sequence[torch.Tensor]:
            outs = list(function(now))
            for k in shared:
                outs[k] = outs[k].clone()
            return outs

        return apart


@contextmanager
def _no_checks_of_layouts() -> Iterator[None]:
    """While it is entered, the code generator writes no checks of what a run is given: a
    function is called for one layout alone.
    """
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen  # takes a second

    checks = PythonWrapperCodegen.codegen_input_size_asserts
    PythonWrapperCodegen.codegen_input_size_asserts = lambda self: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        PythonWrapperCodegen.codegen_input_size_asserts = checks  # type: ignore[method-assign]


def _emptying(function: Callable[..., Sequence[torch.Tensor]]) -> Function:
    """What `torch._inductor.compile` wraps, which lets go of its arguments on the way; where it is
    not to be found, a function that keeps them to its end.
    """
    within: Any = function
    while within is not None and _takes_any_number(within):
        within = getattr(within, "__wrapped__", None)
    if getattr(within, "_boxed_call", False):
        return cast(Function, within)

    def keeping(given: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        arguments = tuple(given)
        given.clear()
        return function(*arguments)

    return keeping


def _takes_any_number(function: Any) -> bool:
    code = getattr(function, "__code__", None)
    return code is not None and bool(code.co_flags & inspect.CO_VARARGS)


def _is_traced(node: Node) -> bool:
    specs = [spec for spec in node.outputs if spec is not None]
    return node.op in TRACED and (specs[0].dtype != torch.float64 or traces_doubles())


@cache
def traces_doubles() -> bool:
    """Whether torch says of its attention of float64 what the kernel gives: 2.11 calls the sums of
    exponentials float32, and the code generator would read them so.
    """
    rows = torch.empty(1, 1, 1, 8, dtype=torch.float64, device="meta")
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    said: torch.Tensor = attention(rows, rows, rows)[1]
    return said.dtype == torch.float64


def to_fx(graph: Graph, device: torch.device) -> fx.GraphModule:
    """The graph as a module of torch.fx: inputs by position, outputs as a list."""
    made = fx.Graph()
    values: dict[Ref, fx.Node] = {Ref(i.name): made.placeholder(i.name) for i in graph.inputs}

    def value(arg: Any) -> Any:
        if isinstance(arg, Ref):
            return values[arg]
        return [value(a) for a in arg] if isinstance(arg, tuple) else arg

    for node in graph.nodes:
        kwargs = {k: value(v) for k, v in node.kwargs}
        if makes_tensor(node.op):
            kwargs["device"] = device
        function = DIRECT[node.op] if _is_traced(node) else resolve_op(node.op)
        call = made.call_function(function, tuple(map(value, node.args)), kwargs)
        several = len(node.outputs) > 1 or returns_list(node.op)
        for k in range(len(node.outputs)):
            values[Ref(node.name, k)] = (
                made.call_function(operator.getitem, (call, k)) if several else call
            )
    made.output([values[o.ref] for o in graph.outputs])
    made.eliminate_dead_code()
    return fx.GraphModule({}, made)


def _fuses(node: Node) -> bool:
    return node.op.startswith("aten.") or node.op in CALLED


def _runs(nodes: Sequence[Node]) -> Iterator[tuple[Node, ...]]:
    """The nodes in order, those that can be fused with as many as can be. What a backward
    makes again for a run of blocks is by itself, or all would be made at its start.
    """
    for (fuses, _), run in groupby(nodes, lambda node: (_fuses(node), run_of(node.name))):
        if fuses:
            yield tuple(run)
        else:
            yield from ((node,) for node in run)


def _part(
    run: Sequence[Node], made: Sequence[Ref], specs: Mapping[Ref, TensorSpec]
) -> tuple[Graph, tuple[Ref, ...]]:
    """The graph of a run that makes `made`, in names of its own, and what it is given.

    Equal runs have equal graphs. `specs` are those of all values that the run reads.
    """
    names = {node.name: f"n{k}" for k, node in enumerate(run)}
    given: dict[Ref, Ref] = {}

    def now(ref: Ref) -> Ref:
        if ref.node in names:
            return Ref(names[ref.node], ref.index)
        return given.setdefault(ref, Ref(f"i{len(given)}"))

    nodes = tuple(
        Node(
            names[n.name],
            n.op,
            map_refs(n.args, now),
            map_refs(n.kwargs, now),
            n.outputs,
        )
        for n in run
    )
    inputs = tuple(Input(own.node, InputKind.SAVED, specs[ref]) for ref, own in given.items())
    outputs = tuple(Output(str(k), OutputKind.SAVED, now(ref)) for k, ref in enumerate(made))
    return Graph(inputs, nodes, outputs), tuple(given)


def _shared(
    part: Graph, given: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]
) -> tuple[int, ...]:
    """The outputs that should be in memory of their own, and are not.

    What the code generator finds to be equal it computes once.
    """
    owned = owned_outputs(part)
    times = Counter(x.untyped_storage().data_ptr() for x in (*given, *outs))
    return tuple(
        k
        for k, (out, value) in enumerate(zip(part.outputs, outs, strict=True))
        if out.name in owned and times[value.untyped_storage().data_ptr()] > 1
    )
