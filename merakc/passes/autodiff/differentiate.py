"""Differentiates a stage: one recorded graph becomes a forward and a backward graph.

The stage is traced with `torch.autograd.grad` on fake tensors, which gives one flat ATen graph of
both directions, collectives included. It is then split: what the outputs need runs
in the forward, what depends on the tangents in the backward, and the values that pass between
them are the saved activations.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
import torch.fx as fx
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)
from torch.fx.experimental.proxy_tensor import make_fx

from merakc.errors import MerakError, RecordError, ShardError, failure
from merakc.frontend.calls.forms import new_fake_mode
from merakc.frontend.carried import check_repeats
from merakc.frontend.functions import Apply, unchanged_arguments
from merakc.frontend.python.fingerprint import ADDRESS
from merakc.frontend.python.state import PythonState
from merakc.ir.graph import Graph, Input, InputKind, Node, Output, OutputKind, Ref, TensorSpec
from merakc.ir.program import StageGraphs
from merakc.kernels.ops import uses_autograd
from merakc.passes.autodiff.by_call import ByCall, UnclearError
from merakc.passes.autodiff.interpret import interpret
from merakc.passes.autodiff.refusals import of_unknown_size, without_derivative, writes_to
from merakc.passes.autodiff.tracer import PLACES, Tracer

ROOTS = (OutputKind.LOSS, OutputKind.ACTIVATION, OutputKind.WAIST)
# Calls whose gradients are torch's formulas or ours, and those among them that run a user's module.
OWN = ("aten.", "composite.", "merakc.")
OPAQUES = "merakc.opaque"


def joint_graph(graph: Graph) -> Graph:
    """Forward and backward of a stage in one graph.

    Gradients are those of the `LOSS`, `ACTIVATION` and `WAIST` outputs with respect to every input
    that requires one; an input that reaches none of them gets no gradient output.
    """
    grads = graph.grad_values()
    wanted = [i for i in graph.inputs if i.requires_grad]
    roots = [o for o in graph.outputs if o.kind in ROOTS and o.ref in grads]
    specs = graph.specs()
    tangents = [Input(f"tangent:{o.name}", InputKind.TANGENT, specs[o.ref], o.name) for o in roots]
    found: list[str] = []
    joint, results = _checked(graph, lambda: _trace(graph, wanted, roots, tangents, found))
    _check_constants(joint)
    outputs = [
        Output(o.name, o.kind, ref)
        for o, ref in zip(graph.outputs, results[: len(graph.outputs)], strict=True)
    ]
    gradients = [
        Output(name, OutputKind.GRADIENT, ref)
        for name, ref in zip(found, results[len(graph.outputs) :], strict=True)
    ]
    return Graph(joint.inputs, joint.nodes, (*outputs, *gradients), joint.constants)


def _checked(graph: Graph, trace: Callable[[], tuple[Graph, list[Ref]]]) -> tuple[Graph, list[Ref]]:
    """What `trace` gives; of custom functions, whose Python it runs, each time the same.

    Raises `RecordError` where that leaves something behind, or reads values.
    """
    classes = {f.cls for f in graph.functions.values() if isinstance(f, Apply)}
    if not classes:
        try:
            return trace()
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise of_unknown_size(graph, error) from error
    names = ", ".join(sorted(cls.__name__ for cls in classes))
    state = PythonState(nn.Module(), classes)
    try:
        with unchanged_arguments():
            made, again = trace(), list[Graph]()
        check_repeats(state, lambda: again.append(trace()[0]))
        again = again or [trace()[0]]
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise RecordError(
            f"the backward of a custom function ({names}) reads values of its tensors ({error}); "
            "compute with tensors alone there"
        ) from error
    finally:
        state.put_back()
    first, second = ([ADDRESS.sub("", str(n)) for n in g.nodes] for g in (made[0], again[0]))
    if first != second:
        raise RecordError(
            f"a custom function ({names}) computes something else in its second backward than in "
            "its first: a compiled step is the first; give it all that it reads as arguments"
        )
    return made


def _check_constants(joint: Graph) -> None:
    """Refuses a parameter that turned up while code of users was traced: it would never change."""
    for value in joint.constants.values():
        if isinstance(value, torch.nn.Parameter):
            raise RecordError(
                f"the backward of a custom autograd function reads a parameter of shape "
                f"{tuple(value.shape)} that apply() was not given; give it as an argument, and "
                "keep it by ctx.save_for_backward"
            )


def _trace(
    graph: Graph,
    wanted: Sequence[Input],
    roots: Sequence[Output],
    tangents: Sequence[Input],
    found: list[str],
) -> tuple[Graph, list[Ref]]:
    """The joint graph and what it returns; `found` is filled with the names of the inputs that have
    a gradient.
    """
    # Constants stay real tensors: an op may need their values (`fill` with a 0-dim tensor).
    free = [i for i in graph.inputs if i.name not in graph.constants]
    names = [i.name for i in free]
    positions = [graph.outputs.index(o) for o in roots]

    joint = partial(_joint, graph, names, wanted, positions, found)
    given = [*free, *tangents]
    # The casts of an autocast region are nodes already; one around us would cast once more.
    with warnings.catch_warnings(), torch.enable_grad(), torch._C._DisableAutocast():
        warnings.simplefilter("ignore")
        if all(n.op.startswith(OWN) and not n.op.startswith(OPAQUES) for n in graph.nodes):
            with suppress(UnclearError, RuntimeError):
                return _by_call(graph, wanted, list(zip(roots, tangents, strict=True)), found)
        mode = new_fake_mode()
        with mode:
            made = [torch.empty(i.spec.shape, dtype=i.spec.dtype) for i in given]
        values, seeds = made[: len(free)], made[len(free) :]
        tracer = Tracer({Ref(i.name): x for i, x in zip(given, made, strict=True)})
        try:
            with mode, tracer:
                results = [tracer.ref(x) for x in joint(values, seeds, tracer.at)]
        except RuntimeError as error:
            tracer.unclear = str(error)
        if not tracer.unclear:
            inputs = (*given, *tracer.inputs)
            return Graph(inputs, tuple(tracer.nodes), (), tracer.constants), results
        own = any(uses_autograd(node.op) for node in graph.nodes)
        try:
            return _convert(_by_torch(joint, values, seeds, own=own), graph, tangents)
        except MerakError as error:
            raise without_derivative(graph, error) or error from error.__cause__


def _by_call(
    graph: Graph,
    wanted: Sequence[Input],
    roots: Sequence[tuple[Output, Input]],
    found: list[str],
) -> tuple[Graph, list[Ref]]:
    """The joint graph as `ByCall` writes it, of meta tensors.

    These take a fraction of the time of fake ones, of which each call passes through Python. But
    they say of themselves that they are on no device that computes, which Python code may ask: that
    of users sees fake tensors alone.
    """
    found.clear()
    writer = ByCall(graph)
    free = [i for i in graph.inputs if i.name not in graph.constants]
    writer.run(free)
    reached = [(o.ref, tangent) for o, tangent in roots if writer.trained(o.ref)]
    writer.backward(reached)
    results = [writer.ref(o.ref) for o in graph.outputs]
    for item in wanted if reached else ():
        # A stage before this one waits for the gradient of what it sent.
        waited = item.kind is InputKind.ACTIVATION
        ref = writer.gradient(Ref(item.name), zeros=waited)
        if ref is not None:
            found.append(item.name)
            results.append(ref)
    inputs = (*free, *(t for _, t in roots), *writer.inputs)
    return Graph(inputs, tuple(writer.nodes), (), writer.constants), results


def _by_torch(
    joint: Callable[..., list[torch.Tensor]],
    values: list[torch.Tensor],
    seeds: list[torch.Tensor],
    *,
    own: bool,
) -> fx.GraphModule:
    """What torch's own tracer makes of it, which can do more, or says why it cannot: `own` says
    whether functions of the user's are in it.
    """
    try:
        return _traced(lambda v, s: joint(v, s, lambda _: None), values, seeds)
    except (DataDependentOutputException, DynamicOutputShapeException):
        raise
    except RuntimeError as error:
        if not own:
            raise ShardError(
                f"the backward of this rank's part of the forward fails: {failure(error)}; no "
                "function of yours is in it: a rule by which it is split is wrong, which is a "
                "defect of merakc; train with tp=1 and cp=1"
            ) from error
        raise RecordError(
            f"the backward of the forward that was recorded fails: {failure(error)}; mend the "
            "backward of the custom function that it comes from: it is called with parts of "
            "the batch, and with all of it"
        ) from error


def _joint(
    graph: Graph,
    names: Sequence[str],
    wanted: Sequence[Input],
    positions: Sequence[int],
    found: list[str],
    values: list[torch.Tensor],
    seeds: list[torch.Tensor],
    before: Callable[[Node], None] = lambda node: None,
) -> list[torch.Tensor]:
    """Runs the graph on these values of its inputs of those names, and then backward."""
    found.clear()
    given = dict(zip(names, values, strict=True))
    for item in wanted:
        given[item.name] = given[item.name].detach().requires_grad_()
    outs = interpret(graph, given, before)
    reached = [(outs[p], s) for p, s in zip(positions, seeds, strict=True)]
    return [*outs, *_gradients(given, wanted, reached, found)]


def _gradients(
    given: Mapping[str, torch.Tensor],
    wanted: Sequence[Input],
    reached: Sequence[tuple[torch.Tensor, torch.Tensor]],
    found: list[str],
) -> list[torch.Tensor]:
    """The gradients of what is reached, each with its tangent; `found` gets their names."""
    reached = [(out, seed) for out, seed in reached if out.requires_grad]
    if not wanted or not reached:
        return []
    leaves = [given[i.name] for i in wanted]
    grads = torch.autograd.grad(
        [out for out, _ in reached], leaves, [seed for _, seed in reached], allow_unused=True
    )
    every = dict(zip([i.name for i in wanted], grads, strict=True))
    for item in wanted:
        if item.kind is InputKind.ACTIVATION and every[item.name] is None:
            # A stage before this one waits for the gradient of what it sent.
            every[item.name] = torch.zeros_like(given[item.name])
    pairs = [(name, g) for name, g in every.items() if g is not None]
    found.extend(name for name, _ in pairs)
    return [g for _, g in pairs]


def _traced(
    joint: Callable[[list[torch.Tensor], list[torch.Tensor]], list[torch.Tensor]],
    values: list[torch.Tensor],
    seeds: list[torch.Tensor],
) -> fx.GraphModule:
    """What `make_fx` traces, without calls that write, but to what is given."""
    traced = make_fx(joint)(values, seeds)
    if any(map(_is_mutating, traced.graph.nodes)):  # some of torch's backward formulas write
        traced = make_fx(torch.func.functionalize(traced))(values, seeds)
    return traced


def _is_mutating(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _convert(
    module: fx.GraphModule, graph: Graph, tangents: Sequence[Input]
) -> tuple[Graph, list[Ref]]:
    """The traced graph in our own form, and what it returns."""
    inputs = [i for i in graph.inputs if i.name not in graph.constants] + list(tangents)
    given = iter(list(inputs))
    constants: dict[str, torch.Tensor] = {}
    nodes: list[Node] = []
    refs: dict[fx.Node, Ref] = {}
    results: list[Ref] = []

    def value(arg: Any) -> Any:
        if isinstance(arg, fx.Node):
            return refs[arg]
        if isinstance(arg, (list, tuple)):
            return tuple(value(a) for a in arg)
        return arg

    for node in module.graph.nodes:
        if _is_mutating(node):  # at the end, to what is given
            written = next(i for i in inputs if i.name == refs[node.args[0]].node)
            if written.kind is not InputKind.TANGENT:  # of which nobody else has the tensor
                raise writes_to(graph, (written.target or written.name).removeprefix("known."))
        elif node.op == "placeholder":
            refs[node] = Ref(next(given).name)
        elif node.op == "get_attr":
            tensor = getattr(module, node.target)
            name = f"traced:{node.target}"
            if name not in constants:
                spec = TensorSpec(tuple(tensor.shape), tensor.dtype)
                inputs.append(Input(name, InputKind.CONSTANT, spec))
            constants[name] = tensor
            refs[node] = Ref(name)
        elif node.op == "output":
            results = [refs[a] for a in node.args[0]]
        elif node.target is operator.getitem:
            refs[node] = Ref(refs[node.args[0]].node, node.args[1])
        else:
            refs[node] = Ref(f"j:{node.name}")
            nodes.append(_node(node, value))
    return Graph(tuple(inputs), tuple(nodes), (), constants), results


def _node(node: fx.Node, value: Any) -> Node:
    meta = node.meta["val"]
    outs = meta if isinstance(meta, (list, tuple)) else (meta,)
    specs = tuple(
        TensorSpec(tuple(o.shape), o.dtype) if isinstance(o, torch.Tensor) else None for o in outs
    )
    kwargs = tuple((k, value(v)) for k, v in node.kwargs.items() if k not in PLACES)
    return Node(f"j:{node.name}", str(node.target), value(tuple(node.args)), kwargs, specs)


def partition(joint: Graph) -> StageGraphs:
    """Splits the joint graph into forward and backward.

    A node that needs no tangent but only serves the backward runs there if it reads nothing but
    the stage's inputs, and in the forward otherwise.
    """
    gradients = tuple(o for o in joint.outputs if o.kind is OutputKind.GRADIENT)
    results = tuple(o for o in joint.outputs if o.kind is not OutputKind.GRADIENT)
    if not gradients:
        kept = tuple(i for i in joint.inputs if i.kind is not InputKind.TANGENT)
        return StageGraphs(Graph(kept, joint.nodes, results, joint.constants).pruned(), None)
    inputs = {i.name: i for i in joint.inputs}
    tangent = {i.name for i in joint.inputs if i.kind is InputKind.TANGENT}
    needed = {n.name for n in Graph(joint.inputs, joint.nodes, results).pruned().nodes}
    backward: list[Node] = []
    in_backward = set(tangent)
    available = set(inputs)  # what the backward has without saving anything
    for node in joint.nodes:
        reads = {r.node for r in node.refs}
        cheap = node.name not in needed and reads <= available
        if reads & in_backward or cheap:
            backward.append(node)
            in_backward.add(node.name)
            if cheap:
                available.add(node.name)
    forward = [n for n in joint.nodes if n.name not in in_backward]
    read = dict.fromkeys(r for n in backward for r in n.refs)
    read.update(dict.fromkeys(o.ref for o in gradients))
    saved = [r for r in read if r.node not in inputs and r.node not in in_backward]
    specs = joint.specs()
    kept_inputs = tuple(i for i in joint.inputs if i.name not in tangent)
    forward_graph = Graph(
        kept_inputs,
        tuple(forward),
        (*results, *(Output(str(r), OutputKind.SAVED, r) for r in saved)),
        joint.constants,
    )
    names = {r: f"saved:{r}" for r in saved}
    backward_inputs = [inputs[r.node] for r in read if r.node in inputs]
    backward_inputs = list(dict.fromkeys(backward_inputs))
    backward_inputs += [Input(names[r], InputKind.SAVED, specs[r], str(r)) for r in saved]
    replaced = {r: Ref(n) for r, n in names.items()}
    backward_graph = Graph(
        tuple(backward_inputs), tuple(backward), gradients, joint.constants
    ).renamed(replaced)
    return StageGraphs(forward_graph, backward_graph)
