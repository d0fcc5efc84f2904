"""A second opinion with numbers: the end of the forward, whole against parts.

The algebra proves; this checks what it proved. Behind the last layers, on random values in float64
with labels that are spread unevenly, the step in parts must give the loss and every gradient that
the recording of the whole batch gives. It shares no rule with the algebra, and reads of it only
where the layers' samples stand.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from merakc.errors import MerakError, RecordError
from merakc.ir.graph import Graph, Input, InputKind, Output, Ref, TensorSpec
from merakc.passes.batches.analyse import Analysis
from merakc.passes.batches.replay import replay
from merakc.passes.batches.split import split
from merakc.passes.batches.tail import shrunk, tail, with_graphs
from merakc.passes.interpret import interpret

Tensors = dict[str, torch.Tensor]
# Relative to the largest number of what is compared; sums of float64 differ by far less.
LIMIT = 1e-7
# Elements of all values together up to which the end is computed: some tenths of a second.
MOST_ELEMENTS = 1 << 22
ATTEMPTS = 2  # of each kind of draw
VIEWS = ("aten.reshape.default", "aten.slice.Tensor", "aten.to.dtype", "aten.contiguous.default")


def certify(found: Analysis, loss: Output) -> str:
    """Compares the loss in parts with that of the whole batch; says why where it could not.

    Raises `RecordError`, with the user's line, where they differ.
    """
    end = tail(found, loss)
    if _elements(end.whole) > MOST_ELEMENTS:
        end = shrunk(end)
    if _elements(end.whole) > MOST_ELEMENTS:
        return "what follows the layers is too large"
    if any(end.outcomes[n.name].filled for n in end.part.nodes):
        return "random masks have no places for just the values of their samples"
    in_float64 = _as_float64(end)
    why = "it gives no finite loss for random values"
    for kind, seed in itertools.product(("normal", "uniform"), range(ATTEMPTS)):
        values = _Draws(in_float64.whole, kind, seed).values()
        try:
            wanted = _loss_and_gradients(_whole(in_float64, values), values)
        except (RuntimeError, IndexError, ValueError, MerakError) as error:
            why = f"it fails on random values ({error})"
            continue
        if not wanted[0].isfinite():
            continue
        outputs = in_float64.part.outputs
        step = split(in_float64, outputs, most=1.0)
        count = found.total // found.samples
        if count * found.samples != found.total:
            return "the whole batch is no multiple of its parts"
        sizes = [found.samples] * count
        sampled = dict(found.sampled)
        for item in in_float64.part.inputs:
            rows = in_float64.states[Ref(item.name)].rows
            brought = item.kind is InputKind.BATCH and item.target == item.name
            if (item.kind is InputKind.ACTIVATION or brought) and rows is not None:
                sampled[item.target] = rows
        parts = replay([step] * count, sizes, values, values, sampled)
        got = _loss_and_gradients(parts, values)
        worst = max(map(_difference, wanted, got))
        if worst > LIMIT:
            node = found.makers[loss.ref.node]
            raise RecordError(
                f"{node.source}: computed with numbers, the loss of {count} parts of "
                f"{found.samples} samples and its gradients differ from those of the whole batch "
                f"by {worst:.1e} of their size: a rule is wrong of a call between the last layers "
                "and the loss; train with dp=1 and micro_batches=1, and report it"
            )
        return ""
    return why


def _elements(graph: Graph) -> int:
    return sum(spec.numel for spec in graph.specs().values())


def _loss_and_gradients(loss: torch.Tensor, values: Tensors) -> list[torch.Tensor]:
    wanted = [x for x in values.values() if x.requires_grad]
    if not loss.requires_grad:
        return [loss.detach()]
    gradients = torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True)
    return [loss.detach(), *gradients]


def _difference(one: torch.Tensor, two: torch.Tensor) -> float:
    scale = max(float(one.abs().max()), 1e-12) if one.numel() else 1.0
    apart = (one - two).abs().nan_to_num(nan=0.0)
    unlike = one.isnan() != two.isnan()
    return float("inf") if unlike.any() else float(apart.max()) / scale if one.numel() else 0.0


def _whole(found: Analysis, values: Tensors) -> torch.Tensor:
    given = {
        i.name: values[i.target or i.name]
        for i in found.whole.inputs
        if i.name not in found.whole.constants
    }
    (loss,) = interpret(found.whole, given)
    total: torch.Tensor = loss.sum()
    return total


class _Draws:
    """Random values for the inputs of a graph, by their targets."""

    def __init__(self, graph: Graph, kind: str, seed: int) -> None:
        self.graph, self.kind = graph, kind
        self.random = torch.Generator().manual_seed(seed)
        self.special = {name: set(values) for name, values in _compared(graph)}

    def values(self) -> Tensors:
        return {
            i.target or i.name: self.draw(i)
            for i in self.graph.inputs
            if i.name not in self.graph.constants
        }

    def draw(self, item: Input) -> torch.Tensor:
        spec = item.spec
        if not spec.dtype.is_floating_point and not spec.dtype.is_complex:
            return self.whole_numbers(item, spec)
        kinds = (InputKind.PARAMETER, InputKind.ACTIVATION)
        normal = self.kind == "normal" and item.kind in kinds
        found = torch.empty(spec.shape, dtype=spec.dtype)
        if normal:
            found.normal_(generator=self.random)
        else:
            found.uniform_(0.05, 0.95, generator=self.random)
        return found.requires_grad_(item.kind in kinds)

    def whole_numbers(self, item: Input, spec: TensorSpec) -> torch.Tensor:
        """Zeros, ones, and what the graph compares them with: labels to be ignored, ends."""
        choices = torch.tensor([0, 1, *sorted(self.special.get(item.name, ()))])
        pick = torch.randint(len(choices), spec.shape, generator=self.random)
        return choices[pick].to(spec.dtype)


def _compared(graph: Graph) -> Iterator[tuple[str, list[int]]]:
    """The inputs of whole numbers, each with the numbers that the graph asks of them."""
    root = {Ref(i.name): i.name for i in graph.inputs}
    for node in graph.nodes:
        if node.op in VIEWS and node.refs[0] in root:
            root |= dict.fromkeys(node.made, root[node.refs[0]])
        for k, ref in enumerate(node.refs):
            if ref in root and node.op in ("aten.ne.Scalar", "aten.eq.Scalar") and k == 0:
                yield root[ref], [node.args[1]] if isinstance(node.args[1], int) else []


def _as_float64(found: Analysis) -> Analysis:
    """The same in float64."""

    def spec(before: TensorSpec | None) -> TensorSpec | None:
        if before is None or not before.dtype.is_floating_point:
            return before
        return TensorSpec(before.shape, torch.float64)

    def wide(value: Any) -> Any:
        if isinstance(value, tuple) and not isinstance(value, Ref):
            return tuple(map(wide, value))
        is_float = isinstance(value, torch.dtype) and value.is_floating_point
        return torch.float64 if is_float else value

    def lifted(graph: Graph) -> Graph:
        inputs = tuple(replace(i, spec=spec(i.spec) or i.spec) for i in graph.inputs)
        nodes = tuple(
            replace(
                n,
                args=wide(n.args),
                kwargs=tuple((k, wide(v)) for k, v in n.kwargs),
                outputs=tuple(map(spec, n.outputs)),
            )
            for n in graph.nodes
        )
        constants = {
            k: v.double() if v.is_floating_point() else v for k, v in graph.constants.items()
        }
        return replace(graph, inputs=inputs, nodes=nodes, constants=constants)

    return with_graphs(found, lifted(found.part), lifted(found.whole))
