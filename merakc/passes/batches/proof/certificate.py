"""A second opinion with numbers: the end of the forward, whole against parts.

The algebra proves; this checks what it proved. On random values in float64 with labels that are
spread unevenly, the step in parts must give the loss and every gradient that the recording of the
whole batch gives: of a small model all of it, of others what stands behind the last layers. It
shares no rule with the algebra, and reads of it only where the layers' samples stand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch

from merakc.errors import MerakError, RecordError, failure
from merakc.ir.batches import Rows
from merakc.ir.graph import Graph, Input, InputKind, Node, Output, Ref, TensorSpec
from merakc.kernels.opaque import OPAQUE
from merakc.passes.autodiff.interpret import interpret
from merakc.passes.batches.analyse import Analysis
from merakc.passes.batches.normalise import CROSS_ENTROPY, NLL
from merakc.passes.batches.part import keyed
from merakc.passes.batches.proof.replay import replay
from merakc.passes.batches.proof.tail import shrunk, tail, with_graphs
from merakc.passes.batches.split import split
from merakc.passes.sharding.dims import given

Tensors = dict[str, torch.Tensor]
Made = TypeVar("Made")
# Relative to the largest number of what is compared; sums of float64 differ by far less.
LIMIT = 1e-7
# Where whole numbers meet Python's floats torch computes in float32, whatever all else is in.
LIMIT_FLOAT32 = 1e-5
# What is smaller than this part of the largest number of all, or of 1, about which the values are
# that are drawn, may be nothing but rounding.
SMALL = 1e-7
# Elements of all values together up to which the end is computed: some tenths of a second.
MOST_ELEMENTS = 1 << 22
# Where values that are nudged by a part of themselves that is many roundings give another loss, by
# as much as the parts do or nearly so, or by ten billion times as much as they were nudged, nothing
# is known: of a matrix that has no inverse, say.
NUDGE, SURE, LOST = 1e-13, 10, 1e-3
# Calls of the parts and the whole batch together up to which the layers are computed, too.
MOST_CALLS = 2000
# Elements up to which more than one draw is compared: a choice, such as of the samples above a
# median, may be the same by chance.
FEW_ELEMENTS = 1 << 16
# How values are drawn: normal ones for what is trained, in full size or small, lest margins hide
# all else; all between 0 and 1; or with zeros among the batch's, as in masks, of which half of the
# samples hold nothing else. Beside each, from how many numbers whole ones are drawn, lest a class
# be missing.
DRAWS = (
    ("normal", 2), ("uniform", 3), ("small", 6), ("sparse", 2),
    ("normal", 3), ("small", 2), ("sparse", 3), ("uniform", 2),
)  # fmt: skip
SMALL_VALUES, ZEROS = 0.2, 0.4
# What labels pass on their way to a call that compares them.
VIEWS = frozenset(
    f"aten.{name}"
    for name in (
        "reshape.default", "slice.Tensor", "select.int", "unsqueeze.default", "squeeze.dim",
        "squeeze.default", "transpose.int", "permute.default", "t.default", "expand.default",
        "to.dtype", "contiguous.default", "clone.default", "detach.default",
    )
)  # fmt: skip

# Calls that compare an argument with a number, by the place of the one and the name of the other.
ASKED = {
    "aten.ne.Scalar": (0, "other"), "aten.eq.Scalar": (0, "other"),
    CROSS_ENTROPY: (1, "ignore_index"), **dict.fromkeys(NLL, (1, "ignore_index")),
}  # fmt: skip


def certify(found: Analysis, loss: Output, rest: Analysis | None = None) -> str:
    """Compares the loss in parts with that of the whole batch; says why where it could not.

    `rest` is what was found of what remains of the whole batch behind equal parts, if anything
    does. Raises `RecordError`, with the user's line, where they differ.
    """
    count, left = divmod(found.total, found.samples)
    if left and (rest is None or rest.samples != left):
        return "the whole batch is no multiple of its parts"
    parts = [found] * count + [rest] * bool(left)
    few = len(found.whole.nodes) * (len(parts) + 1) <= MOST_CALLS
    why = ""
    for layers in (True, False) if few else (False,):
        own = partial(tail, loss=loss, layers=layers)
        why = _certified(found, loss, _each([f for f in parts if f is not None], own))
        if not why:
            break
    return why


def _certified(found: Analysis, loss: Output, ends: list[Analysis]) -> str:
    """Compares these parts of the batch with the whole of it; says why where it could not."""
    if _elements(ends[0].whole) > MOST_ELEMENTS:
        ends = _each(ends, shrunk)
    if _elements(ends[0].whole) > MOST_ELEMENTS:
        return "what follows the layers is too large"
    if any(end.outcomes[n.name].filled for end in ends for n in end.part.nodes):
        return "random masks have no places for just the values of their samples"
    ends = _each(ends, _as_float64)
    whole, why = _keyed(ends[0]), "it gives no finite loss for random values"
    specs = whole.specs()
    limit = LIMIT_FLOAT32 if any(_promotes(n, specs) for n in whole.nodes) else LIMIT
    several, done = _elements(whole) * (len(ends) + 1) < FEW_ELEMENTS, False
    for seed, (kind, classes) in enumerate(DRAWS):
        values = _Draws(whole, ends[0].sampled, kind, classes, seed).values()
        try:
            wanted = _loss_and_gradients(_whole(whole, values), values)
            if not wanted[0].isfinite():
                continue
            worst = _difference(wanted, _loss_and_gradients(_in_parts(ends, values), values))
            unsure = 0.0
            if worst > limit:
                other = _nudged(values)
                unsure = _difference(wanted, _loss_and_gradients(_whole(whole, other), other))
        except _errors(whole) as error:
            why = f"it fails on random values ({failure(error)})"
            continue
        if worst < unsure * SURE or unsure > LOST:
            why = "its values hang on rounding"
            continue
        if worst > limit and not all(x.isfinite().all() for x in wanted):
            why = "it gives no finite gradients for random values"
            continue  # what is zero times infinity hangs on the order of calls
        if worst > limit:
            node = found.makers[loss.ref.node]
            sizes = ", ".join(str(end.samples) for end in ends)
            raise CertificateError(
                f"{node.source}: computed with numbers, the loss of {len(ends)} parts of {sizes} "
                "samples and its gradients differ from those of the whole batch by "
                f"{worst:.1e} of their size: a rule is wrong of a call that the loss follows from; "
                "train with dp=1 and micro_batches=1, and report it"
            )
        done = True
        if not several and any(x.count_nonzero() for x in wanted[1:]):
            break
    return "" if done else why


def _errors(graph: Graph) -> tuple[type[Exception], ...]:
    """What it may raise on random values: code of the user's anything."""
    theirs = graph.functions or any(n.op == OPAQUE for n in graph.nodes)
    return (Exception,) if theirs else (RuntimeError, IndexError, ValueError, MerakError)


def _each(parts: Sequence[Analysis], made: Callable[[Analysis], Made]) -> list[Made]:
    """What is made of each part; once of parts that are one."""
    known = {id(part): part for part in parts}
    found = {key: made(part) for key, part in known.items()}
    return [found[id(part)] for part in parts]


def _promotes(node: Node, specs: Mapping[Ref, TensorSpec]) -> bool:
    """Whether a call makes floats of whole numbers alone, and is not told which floats."""
    if not node.refs or any(specs[r].dtype.is_floating_point for r in node.refs):
        return False
    told = any(isinstance(a, torch.dtype) for a in (*node.args, *dict(node.kwargs).values()))
    return not told and any(o is not None and o.dtype.is_floating_point for o in node.outputs)


def _keyed(end: Analysis) -> Graph:
    """The recording of the whole batch as it was, whose draws are keyed by its samples."""
    whole = end.recorded or end.whole
    return replace(whole, nodes=tuple(keyed(end, n, end.total) for n in whole.nodes))


def _in_parts(ends: Sequence[Analysis], values: Tensors) -> torch.Tensor:
    """The loss of parts of the batch, one behind the other."""
    steps = _each(ends, lambda end: split(end, end.part.outputs, most=1.0))
    sampled = dict(ends[0].sampled)
    given: dict[bool, Tensors] = {True: {}, False: {}}  # state and batch, which may share names
    for item in ends[0].part.inputs:
        rows = ends[0].states[Ref(item.name)].rows
        if item.kind is InputKind.ACTIVATION and rows is not None:
            sampled[item.target] = rows
        if item.name in values:
            is_state = item.kind in (InputKind.PARAMETER, InputKind.BUFFER)
            given[is_state][item.target or item.name] = values[item.name]
    return replay(steps, [end.samples for end in ends], given[True], given[False], sampled)


def _elements(graph: Graph) -> int:
    return sum(spec.numel for spec in graph.specs().values())


def _loss_and_gradients(loss: torch.Tensor, values: Tensors) -> list[torch.Tensor]:
    wanted = [x for x in values.values() if x.requires_grad]
    if not loss.requires_grad:
        return [loss.detach()]
    gradients = torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True)
    return [loss.detach(), *gradients]


def _difference(wanted: Sequence[torch.Tensor], got: Sequence[torch.Tensor]) -> float:
    """The largest difference of two lists of tensors, relative to the largest number of each."""
    sizes = [float(x.abs().nan_to_num(nan=0.0).max()) for x in wanted if x.numel()]
    least, worst = SMALL * max(1.0, *sizes), 0.0
    for one, two in zip(wanted, got, strict=True):
        if not one.numel():
            continue
        if (one.isnan() != two.isnan()).any():
            return math.inf
        scale = max(float(one.abs().nan_to_num(nan=0.0).max()), least)
        worst = max(worst, float((one - two).abs().nan_to_num(nan=0.0).max()) / scale)
    return worst


def _nudged(values: Tensors) -> Tensors:
    """The same values, but for some rounding; whole numbers, as in masks and signs, as they are."""

    def nudged(x: torch.Tensor, by: float) -> torch.Tensor:
        plain = x.detach()
        return plain.where(plain == plain.round(), plain * (1 + by)).requires_grad_(x.requires_grad)

    return {
        name: nudged(x, NUDGE * (-1) ** k) if x.is_floating_point() else x
        for k, (name, x) in enumerate(values.items())
    }


def _whole(graph: Graph, values: Tensors) -> torch.Tensor:
    inputs = {i.name: values[i.name] for i in graph.inputs if i.name not in graph.constants}
    (loss,) = interpret(graph, inputs)
    total: torch.Tensor = loss.sum()
    return total


class CertificateError(RecordError):
    """Parts that were taken to give what the whole batch gives, and do not: of no reading of the
    batch is that a sign, but of a rule that is wrong.
    """


class _Draws:
    """Random values for the inputs of a graph, by their names."""

    def __init__(
        self, graph: Graph, sampled: Mapping[str, Rows], kind: str, classes: int, seed: int
    ) -> None:
        self.graph, self.sampled, self.kind, self.classes = graph, sampled, kind, classes
        self.random = torch.Generator().manual_seed(seed)
        self.special: dict[str, set[float]] = {}
        for name, values in _compared(graph):
            self.special.setdefault(name, set()).update(values)

    def values(self) -> Tensors:
        return {
            i.name: self.draw(i) for i in self.graph.inputs if i.name not in self.graph.constants
        }

    def draw(self, item: Input) -> torch.Tensor:
        spec, special = item.spec, sorted(self.special.get(item.name, ()))
        if item.kind is InputKind.SCALAR:
            return torch.zeros(spec.shape, dtype=spec.dtype)
        trained = item.kind in (InputKind.PARAMETER, InputKind.ACTIVATION)
        found = torch.empty(spec.shape, dtype=torch.float64)
        if not spec.dtype.is_floating_point and not spec.dtype.is_complex:
            first = range(2 if spec.dtype == torch.bool else self.classes)
            found = self.chosen(spec, [*first, *special])
        elif trained and self.kind in ("normal", "small"):
            found.normal_(generator=self.random)
            found *= SMALL_VALUES if self.kind == "small" else 1.0
        else:
            found.uniform_(0.05, 0.95, generator=self.random)
            if special and not trained:
                kept = torch.rand(spec.shape, generator=self.random) < ZEROS
                found = found.where(kept, self.chosen(spec, special))
        if self.kind == "sparse" and not trained and spec.shape:
            whole = not spec.dtype.is_floating_point
            found = self.missing(item.target, found, special[0] if whole and special else 0.0)
        found = found.to(spec.dtype)
        return found.requires_grad_() if trained and found.is_floating_point() else found

    def chosen(self, spec: TensorSpec, choices: Sequence[float]) -> torch.Tensor:
        """Some of these numbers: labels, those to be ignored, ends, signs."""
        pick = torch.randint(len(choices), spec.shape, generator=self.random)
        return torch.tensor(choices, dtype=torch.float64)[pick]

    def missing(self, target: str, found: torch.Tensor, value: float) -> torch.Tensor:
        """The tensor with elements here and there at a value, and half of its samples all of it."""
        found = found.masked_fill(torch.rand(found.shape, generator=self.random) < ZEROS, value)
        rows = self.sampled.get(target)
        if rows is not None:
            samples = rows.samples(found.shape)
            half = samples // 2
            first = int(torch.randint(half + 1, (), generator=self.random))
            index = torch.arange(found.shape[rows.dim]) // rows.inner % samples
            gone = (index >= first) & (index < first + half)
            found = found.index_fill(rows.dim, gone.nonzero().flatten(), value)
        return found


def _compared(graph: Graph) -> Iterator[tuple[str, list[float]]]:
    """The inputs of a batch with the numbers that the graph compares them with."""
    root = {Ref(i.name): i.name for i in graph.inputs if i.kind is InputKind.BATCH}
    for node in graph.nodes:
        if node.op in VIEWS and node.refs[0] in root:
            root |= dict.fromkeys(node.made, root[node.refs[0]])
        at, name = ASKED.get(node.op, (0, ""))
        asked = given(node, name) if name else None
        ref = node.args[at] if name else None
        if ref in root and isinstance(asked, (int, float)):
            yield root[ref], [asked]


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

    recorded = lifted(found.recorded) if found.recorded else None
    return with_graphs(found, lifted(found.part), lifted(found.whole), recorded)
