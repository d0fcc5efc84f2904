"""Compares a recorded forward, and its differentiated chunk, with the model run eagerly."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from merakc.batches.split import named_tensors
from merakc.frontend.record import Recording, record
from merakc.ir.graph import Graph, InputKind, OutputKind
from merakc.ir.program import StageGraphs
from merakc.passes.autodiff.interpret import interpret
from merakc.passes.pipeline import differentiate

Tensors = dict[str, Tensor]
SEED = 11


@dataclass(frozen=True)
class Result:
    """What a forward and its backward gave: tensors by the names that a recording uses."""

    outputs: Tensors
    buffers: Tensors
    gradients: Tensors


def run_eager(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Result:
    """Forward and backward of a copy of the model, on copies of the batch."""
    model = copy.deepcopy(model)
    args, kwargs = pytree.tree_map_only(Tensor, torch.clone, (tuple(args), dict(kwargs)))
    out = model(*args, **kwargs)
    leaves, _ = pytree.tree_flatten_with_path(out)
    outputs = {
        pytree.keystr(path).strip("[]'.") or "output": leaf
        for path, leaf in leaves
        if isinstance(leaf, Tensor)
    }
    loss = outputs.get("loss", next(iter(outputs.values())))
    if loss.requires_grad:
        loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return Result(
        {n: t.detach() for n, t in outputs.items()}, dict(model.named_buffers()), gradients
    )


def inputs_of(
    graph: Graph, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Tensors:
    """The value of every input but the constants; parameters are leaves of their own."""
    state = {n: t.detach() for n, t in (*model.named_parameters(), *model.named_buffers())}
    batch = named_tensors(args, kwargs)
    values = {}
    for item in graph.inputs:
        if item.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            values[item.name] = state[item.target].clone().requires_grad_(item.requires_grad)
        elif item.kind is InputKind.BATCH:
            values[item.name] = batch[item.target].clone()
        elif item.kind is InputKind.SCALAR:
            whole = not item.spec.dtype.is_floating_point
            values[item.name] = torch.tensor(SEED if whole else 1.0, dtype=item.spec.dtype)
        else:
            assert item.name in graph.constants, item
            continue
        assert tuple(values[item.name].shape) == item.spec.shape, item
        assert values[item.name].dtype == item.spec.dtype, item
    return values


def run_graph(graph: Graph, values: Tensors) -> Result:
    """The graph under autograd."""
    outs = interpret(graph, values)
    by_kind: dict[bool, Tensors] = {True: {}, False: {}}
    for out, value in zip(graph.outputs, outs, strict=True):
        by_kind[out.kind is OutputKind.BUFFER][out.name] = value.detach()
        if out.kind is OutputKind.LOSS and value.requires_grad:
            value.backward()
    targets = {i.name: i.target for i in graph.inputs}
    gradients = {targets[n]: v.grad for n, v in values.items() if v.grad is not None}
    return Result(by_kind[False], by_kind[True], gradients)


def run_chunk(graph: Graph, chunk: StageGraphs, values: Tensors) -> Result:
    """The forward graph of a chunk, then its backward with a tangent of one."""
    with torch.no_grad():
        outs = interpret(chunk.forward, values)
        by_kind: dict[OutputKind, Tensors] = {kind: {} for kind in OutputKind}
        for out, value in zip(chunk.forward.outputs, outs, strict=True):
            by_kind[out.kind][out.name] = value
        results = by_kind[OutputKind.LOSS] | by_kind[OutputKind.RESULT]
        gradients: Tensors = {}
        if chunk.backward is not None:
            given = backward_inputs(chunk.backward, values, by_kind[OutputKind.SAVED])
            targets = {i.name: i.target for i in graph.inputs}
            found = interpret(chunk.backward, given)
            for out, value in zip(chunk.backward.outputs, found, strict=True):
                gradients[targets[out.name]] = value
    return Result(results, by_kind[OutputKind.BUFFER], gradients)


def backward_inputs(backward: Graph, values: Tensors, saved: Tensors) -> Tensors:
    """What a backward graph is given: the forward's inputs, what it saved, tangents of one."""
    given: Tensors = {}
    for item in backward.inputs:
        if item.kind is InputKind.TANGENT:
            given[item.name] = torch.ones(item.spec.shape, dtype=item.spec.dtype)
        elif item.kind is InputKind.SAVED:
            given[item.name] = saved[item.target]
        elif item.name not in backward.constants:
            given[item.name] = values[item.name]
    return given


def check(
    model: nn.Module, *args: Any, relative: float = 0.0, zeros: bool = False, **kwargs: Any
) -> Recording:
    """Records `model(*args, **kwargs)` and compares outputs, buffers and gradients with eager.

    `relative` is the error allowed, over each tensor's largest value; 0 asks for equal bits. With
    `zeros` a gradient that is zero in eager may be missing.
    """
    recording = record(model, args, kwargs)
    wanted = run_eager(model, args, kwargs)
    values = inputs_of(recording.graph, model, args, kwargs)
    chunk = differentiate(recording.graph)
    for found in (
        run_chunk(recording.graph, chunk, values),
        run_graph(recording.graph, values),
    ):
        if zeros:
            missing = wanted.gradients.keys() - found.gradients.keys()
            found.gradients.update({n: torch.zeros_like(wanted.gradients[n]) for n in missing})
        same(found, wanted, model, relative)
    return recording


def same(found: Result, wanted: Result, model: nn.Module, relative: float = 0.0) -> None:
    """Asserts that two results are the same; buffers that were not written may be left out."""
    assert found.outputs.keys() == wanted.outputs.keys()
    assert found.gradients.keys() == wanted.gradients.keys()
    _close(found.outputs, wanted.outputs, relative)
    _close(found.gradients, wanted.gradients, relative)
    _close({**dict(model.named_buffers()), **found.buffers}, wanted.buffers, relative)


def _close(found: Tensors, wanted: Tensors, relative: float) -> None:
    for name in wanted:
        a, b = found[name], wanted[name]
        assert (a.shape, a.dtype) == (b.shape, b.dtype), name
        if torch.equal(a, b):
            continue
        assert torch.equal(a.isnan(), b.isnan()), f"{name}: nan in different places"
        difference = (a - b).nan_to_num().abs().max().item()
        scale = max(b.nan_to_num().abs().max().item(), 1e-6)
        assert difference <= relative * scale, f"{name}: {difference:.3g} of {scale:.3g}"
