"""Forwards of one call each, on samples, constants and sums over samples, in parts and whole.

The calls are those of the table of sharding rules; their sizes are drawn, and some of them are
taken for the number of samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from merakc.ir.batches import Rows
from merakc.ir.graph import Graph, Input, InputKind, Node, Output, OutputKind, Ref, TensorSpec
from merakc.kernels.ops import resolve_op
from merakc.passes.autodiff.interpret import interpret
from merakc.passes.batches.analyse import Analysis, analyse
from merakc.passes.batches.proof.replay import replay
from merakc.passes.batches.split import split
from merakc.passes.batches.states import Kind
from tests.passes.rule_cases import WITHOUT_GRADIENT, Call, Pick, picked

SIZES, TOTAL = (3, 2, 3), 8
LINE = "model.py:1"
Tensors = dict[str, Tensor]


class Unfit(Exception):
    """What was drawn is no call on a batch."""


def numbers(op: str, pick: Pick) -> list[int]:
    """The numbers that a call is made of."""
    found: list[int] = []

    def kept(low: int, high: int) -> int:
        found.append(pick(low, high))
        return found[-1]

    picked(op, kept)
    return found


def call_of(op: str, chosen: Sequence[int]) -> Call:
    """The call that these numbers make."""
    left = iter(chosen)
    try:
        return picked(op, lambda low, high: next(left))
    except (IndexError, RuntimeError, StopIteration, ValueError) as error:
        raise Unfit from error


def tensors(call: Call) -> list[Tensor]:
    """The tensors of a call, in order."""
    return [t for t in pytree.tree_leaves(call) if isinstance(t, Tensor)]


@dataclass
class Forward:
    """The forward of one call for so many samples."""

    graph: Graph
    sampled: dict[str, Rows] = field(default_factory=dict)
    values: Tensors = field(default_factory=dict)


class Writer:
    """Writes the graph of a call; of the whole batch with its values."""

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.inputs: list[Input] = []
        self.nodes: list[Node] = []
        self.sampled: dict[str, Rows] = {}
        self.values: Tensors = {}

    def given(self, name: str, value: Tensor, rows: Rows | None, *, trained: bool = False) -> Ref:
        """An input: of the batch where it has rows, else a parameter or a constant."""
        kind = InputKind.BATCH if rows else InputKind.PARAMETER if trained else InputKind.BUFFER
        self.inputs.append(Input(name, kind, spec_of(value), name, trained))
        self.values[name] = value
        if rows:
            self.sampled[name] = rows
        return Ref(name)

    def add(self, name: str, op: str, *args: Any, **kwargs: Any) -> Ref:
        """A node; its specs are those of what it makes of meta tensors."""
        specs = {Ref(i.name): i.spec for i in self.inputs}
        specs |= {Ref(n.name, k): o for n in self.nodes for k, o in enumerate(n.outputs) if o}

        def lift(value: Any) -> Any:
            if isinstance(value, Ref):
                spec = specs[value]
                return torch.zeros(spec.shape, dtype=spec.dtype)
            return tuple(map(lift, value)) if isinstance(value, tuple) else value

        out = resolve_op(op)(*lift(args), **kwargs)
        outs = out if isinstance(out, (tuple, list)) else (out,)
        made = tuple(spec_of(o) for o in outs)
        self.nodes.append(Node(name, op, args, tuple(kwargs.items()), made, source=LINE))
        return Ref(name)

    def spec(self, ref: Ref) -> TensorSpec:
        """The spec of a node's output."""
        (node,) = [n for n in self.nodes if n.name == ref.node]
        spec = node.outputs[ref.index]
        assert spec is not None
        return spec

    def forward(self, loss: Ref) -> Forward:
        """The forward with this loss."""
        outputs = (Output("loss", OutputKind.LOSS, loss),)
        graph = Graph(tuple(self.inputs), tuple(self.nodes), outputs)
        graph.verify()
        return Forward(graph, self.sampled, self.values)


def spec_of(value: Tensor) -> TensorSpec:
    return TensorSpec(tuple(value.shape), value.dtype)


@dataclass(frozen=True)
class Case:
    """A call, which of its numbers are samples, which tensors are sums and which are trained."""

    op: str
    chosen: tuple[int, ...]
    samples: tuple[int, ...] = ()
    sums: tuple[int, ...] = ()
    trained: bool = True
    inner: bool = True  # whether other factors of a dim of samples stand inside of them

    def call(self, samples: int) -> Call:
        """The call for so many samples."""
        now = [samples if k in self.samples else n for k, n in enumerate(self.chosen)]
        torch.manual_seed(0)
        return call_of(self.op, now)

    def rows(self) -> list[Rows | None]:
        """Where the samples stand in each tensor; raises `Unfit` where they do not."""
        calls = [tensors(self.call(n)) for n in (TOTAL, *SIZES[:2])]
        if len({len(c) for c in calls}) > 1:
            raise Unfit
        found: list[Rows | None] = []
        for whole, *parts in zip(*calls, strict=True):
            if any(p.dim() != whole.dim() for p in parts):
                raise Unfit
            dims = [k for k in range(whole.dim()) if whole.shape[k] != parts[0].shape[k]]
            if not dims:
                if any(p.shape != whole.shape for p in parts):
                    raise Unfit
                found.append(None)
                continue
            each, rest = divmod(whole.shape[dims[0]], TOTAL)
            fits = all(p.shape[dims[0]] == n * each for p, n in zip(parts, SIZES, strict=False))
            if len(dims) > 1 or rest or not fits:
                raise Unfit
            found.append(Rows(dims[0], 1, each) if self.inner else Rows(dims[0], each, 1))
        return found

    def write(self, samples: int) -> tuple[Writer, Ref]:
        """The call for so many samples, without a loss."""
        call, rows, writer = self.call(samples), iter(enumerate(self.rows())), Writer(samples)
        values = iter(tensors(self.call(TOTAL)))

        def lift(arg: Any) -> Any:
            if isinstance(arg, tuple):
                return tuple(map(lift, arg))
            if not isinstance(arg, Tensor):
                return arg
            (k, own), value = next(rows), next(values)
            value = value if own is None or samples == TOTAL else own.take(value, 0, samples)
            numeric = arg.is_floating_point() or arg.is_complex()
            differs = numeric and k not in WITHOUT_GRADIENT.get(self.op, ())
            if own is None and not (k in self.sums and numeric):
                return writer.given(f"x{k}", value, None, trained=differs)
            if own is None:
                many = torch.stack([value * (1 + n / 7) for n in range(samples)])
                x = writer.given(f"x{k}", many, Rows())
            else:
                x = writer.given(f"x{k}", value, own)
            if differs and self.trained:
                one = writer.given(f"p{k}", torch.ones((), dtype=value.dtype), None, trained=True)
                x = writer.add(f"t{k}", "aten.mul.Tensor", x, one)
            return x if own is not None else writer.add(f"s{k}", "aten.sum.dim_IntList", x, (0,))

        named = call[-1] if call and isinstance(call[-1], dict) else {}
        plain = call[: len(call) - isinstance(call[-1], dict)] if call else call
        try:
            return writer, writer.add("y", self.op, *lift(plain), **named)
        except (IndexError, RuntimeError, StopIteration, ValueError) as error:
            raise Unfit from error


def weighed(writer: Writer, claims: Sequence[Rows | None]) -> Forward:
    """The forward with a loss that knows each sample's place by the claims."""
    order = torch.linspace(-1, 2, TOTAL, dtype=torch.float64)[: writer.samples]
    samples = writer.given("order", order, Rows())
    terms: list[Ref] = []
    (node,) = [n for n in writer.nodes if n.name == "y"]
    for k, rows in enumerate(claims):
        out, spec = Ref("y", k), node.outputs[k]
        assert spec is not None
        if spec.dtype.is_complex:
            out = writer.add(f"abs{k}", "aten.abs.default", out)
        out = writer.add(f"to{k}", "aten.to.dtype", out, torch.float64)
        if rows is not None:
            shape = spec.shape
            before, after = shape[: rows.dim], shape[rows.dim + 1 :]
            n = shape[rows.dim] // (rows.outer * rows.inner)
            wide = (*before, rows.outer, n, rows.inner, *after)
            out = writer.add(f"wide{k}", "aten.reshape.default", out, wide)
            weight = (n, *(1 for _ in (rows.inner, *after)))
            own = writer.add(f"w{k}", "aten.reshape.default", samples, weight)
            out = writer.add(f"weighed{k}", "aten.mul.Tensor", out, own)
        squares = writer.add(f"squares{k}", "aten.pow.Tensor_Scalar", out, 2)
        for name, value in ((f"sum{k}", out), (f"total{k}", squares)):
            terms.append(writer.add(name, "aten.sum.default", value))
    loss = terms[0]
    for k, term in enumerate(terms[1:]):
        loss = writer.add(f"loss{k}", "aten.add.Tensor", loss, term)
    return writer.forward(loss)


def found_of(case: Case, samples: int = SIZES[0]) -> Analysis:
    """What is found of a call alone."""
    part, out = case.write(samples)
    whole, _ = case.write(TOTAL)
    return analyse(part.forward(out).graph, whole.forward(out).graph, part.sampled, samples, TOTAL)


def difference(case: Case) -> tuple[list[Kind], float]:
    """What is claimed of the outputs, and the largest relative difference between the step in parts
    and the whole.
    """
    found = found_of(case)
    (node,) = [n for n in found.part.nodes if n.name == "y"] or [None]
    if node is None or any(o is None or not math.prod(o.shape) for o in node.outputs):
        raise Unfit
    states = [found.states[Ref("y", k)] for k in range(len(node.outputs))]
    claims = [s.rows if s.kind is Kind.ROWS else None for s in states]
    whole = weighed(case.write(TOTAL)[0], claims)
    parts = [weighed(case.write(n)[0], claims) for n in SIZES]
    splits = []
    for part, n in zip(parts, SIZES, strict=True):
        one = analyse(part.graph, whole.graph, part.sampled, n, TOTAL)
        splits.append(split(one, part.graph.outputs))
    values = whole.values
    state = {n: v for n, v in values.items() if n not in whole.sampled}
    trained = [i.target for i in whole.graph.inputs if i.requires_grad]
    for name in trained:
        state[name] = state[name].clone().requires_grad_()
    batch = {n: v for n, v in values.items() if n in whole.sampled}
    try:
        (plain,) = interpret(whole.graph, {**state, **batch})
    except RuntimeError as error:  # a sum is no probability
        raise Unfit from error
    wanted = gradients(plain, state, trained)
    ours = replay(splits, SIZES, state, batch, whole.sampled)
    got = gradients(ours, state, trained)
    pairs = [(ours.detach(), plain.detach()), *zip(got, wanted, strict=True)]
    scale = max(1.0, *(float(b.abs().max()) for _, b in pairs if b.numel()))
    if not all(bool(torch.isfinite(b).all()) for _, b in pairs):
        raise Unfit
    return [s.kind for s in states], max(
        float((a - b).abs().max()) / scale for a, b in pairs if b.numel()
    )


def gradients(loss: Tensor, state: Tensors, names: Sequence[str]) -> list[Tensor]:
    """The gradients of a loss; zeros where there is none."""
    own = [state[n] for n in names]
    if not own or not loss.requires_grad:
        return [torch.zeros_like(t) for t in own]
    found = torch.autograd.grad(loss, own, allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for t, g in zip(own, found, strict=True)]
