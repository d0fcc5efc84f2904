"""Every row of the table: the op on each rank's part gives the parts of the op on the whole."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils import _pytree as pytree

from merakc.ir.graph import Graph, Input, InputKind, Node, Output, OutputKind, Ref, TensorSpec
from merakc.kernels.ops import resolve_op
from merakc.passes.autodiff.interpret import interpret
from merakc.passes.sharding.choose import refused_factors
from merakc.passes.sharding.dims import Dims
from merakc.passes.sharding.factors import Factor, atoms
from merakc.passes.sharding.layouts import Sharding
from merakc.passes.sharding.propagate import propagate
from merakc.passes.sharding.rows import Whole
from merakc.passes.sharding.rules import ROWS, row_of
from merakc.passes.sharding.shard import sharding_of
from merakc.passes.sharding.spmd import spmd_partition
from tests.passes.lockstep import in_lockstep, relative_error
from tests.passes.rule_cases import OPS, WITHOUT_GRADIENT, Call, Pick, picked

BOUND = 1e-12
Cuts = dict[int, tuple[str, int, int]]


# The values are undefined; the shapes are not.
WITHOUT_VALUES = tuple(f"aten.{name}" for name in (
    "empty_like.default", "empty.memory_format", "empty_strided.default", "new_empty.default",
    "new_empty_strided.default",
))  # fmt: skip


def build(op: str, call: Call, cuts: Cuts | None = None) -> tuple[Graph, dict[str, Tensor]]:
    """A graph of one call, and the values of its inputs.

    `cuts[k] = kind, dim, at` lets the k-th tensor come from a view: of one with the dim as two
    dims, the outer of size `at` ("reshape"), or of two parts, the first of length `at` ("cat").
    """
    values: dict[str, Tensor] = {}
    trained: set[str] = set()
    nodes: list[Node] = []
    places = count()

    def given(arg: Tensor, place: int) -> Ref:
        name = f"x{len(values)}"
        values[name] = arg
        numeric = arg.is_floating_point() or arg.is_complex()
        if numeric and place not in WITHOUT_GRADIENT.get(op, ()):
            trained.add(name)
        return Ref(name)

    def lift(arg: Any) -> Any:
        if isinstance(arg, tuple):
            return tuple(map(lift, arg))
        if not isinstance(arg, Tensor):
            return arg
        place = next(places)
        if place not in (cuts or {}):
            return given(arg, place)
        kind, dim, at = (cuts or {})[place]
        name, spec = f"v{len(values)}", TensorSpec(tuple(arg.shape), arg.dtype)
        if kind == "reshape":
            source = given(arg.unflatten(dim, (at, -1)), place)
            view, args = "aten.reshape.default", (source, spec.shape)
        else:
            parts = arg.split((at, arg.shape[dim] - at), dim)
            view, args = "aten.cat.default", (tuple(given(part, place) for part in parts), dim)
        nodes.append(Node(name, view, args, (), (spec,), source="model.py:1"))
        return Ref(name)

    named = call[-1] if call and isinstance(call[-1], dict) else {}
    plain = call[: len(call) - isinstance(call[-1], dict)] if call else call
    args = lift(plain)
    out = resolve_op(op)(*plain, **named)
    outs = out if isinstance(out, (tuple, list)) else (out,)
    specs = tuple(TensorSpec(tuple(o.shape), o.dtype) for o in outs)
    nodes.append(Node("y", op, args, tuple(named.items()), specs, source="model.py:1"))
    inputs = tuple(
        Input(n, InputKind.PARAMETER, TensorSpec(tuple(v.shape), v.dtype), n, n in trained)
        for n, v in values.items()
    )
    outputs = tuple(Output(f"y{k}", OutputKind.LOSS, Ref("y", k)) for k in range(len(outs)))
    return Graph(inputs, tuple(nodes), outputs), values


def draw_cuts(call: Call, pick: Pick) -> Cuts:
    """Views to take some of the tensors of a call from."""
    tensors = [t for t in pytree.tree_leaves(call) if isinstance(t, Tensor)]
    cuts: Cuts = {}
    for place, tensor in enumerate(tensors):
        dim = pick(0, tensor.dim() - 1) if tensor.dim() else 0
        full = tensor.shape[dim] if tensor.dim() else 1
        kind = ("", "reshape", "cat")[pick(0, 2)]
        outer = [n for n in range(2, full) if full % n == 0]
        if kind == "reshape" and outer:
            cuts[place] = kind, dim, outer[pick(0, len(outer) - 1)]
        elif kind == "cat" and full > 1:
            cuts[place] = kind, dim, pick(1, full - 1)
    return cuts


def run(
    graph: Graph, values: dict[str, Tensor], tangents: list[Tensor]
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Outputs, and the gradients of sum(output * tangent)."""
    given = {
        i.name: values[i.name].clone().requires_grad_(i.requires_grad)
        for i in graph.inputs
        if i.name not in graph.constants
    }
    outs = interpret(graph, given)
    reached = [(o, t) for o, t in zip(outs, tangents, strict=True) if o.requires_grad]
    if reached:
        torch.autograd.backward([o for o, _ in reached], [t for _, t in reached])
    grads = {n: t.grad for n, t in given.items() if t.grad is not None}
    return [o.detach() for o in outs], grads


def check(graph: Graph, values: dict[str, Tensor], sharding: Sharding) -> None:
    """Compares all ranks with one."""
    tp = sharding.tp
    tangents = [
        torch.randn(spec.shape).to(torch.promote_types(spec.dtype, torch.float64))
        for spec in graph.nodes[-1].outputs
        if spec
    ]
    wanted, wanted_grads = run(graph, values, tangents)
    lays = [sharding.layouts[Ref("y", k)] for k in range(len(wanted))]

    def rank(r: int) -> tuple[list[Tensor], dict[str, Tensor]]:
        own = {n: sharding.layouts[Ref(n)].take(v, tp, r) for n, v in values.items()}
        seeds = [lay.take(t, tp, r) for lay, t in zip(lays, tangents, strict=True)]
        return run(spmd_partition(graph, sharding, r), own, seeds)

    ranks = in_lockstep(tp, rank)
    for k, full in enumerate(wanted):
        found = lays[k].join([outs[k] for outs, _ in ranks])
        assert found.shape == full.shape
        if graph.nodes[-1].op not in WITHOUT_VALUES:
            dtype = torch.promote_types(full.dtype, torch.float64)
            assert relative_error(found.to(dtype), full.to(dtype)) < BOUND, f"output {k}"
    for name, full in wanted_grads.items():
        lay = sharding.layouts[Ref(name)]
        parts = [grads[name] for _, grads in ranks]
        assert relative_error(lay.join(parts), full) < BOUND, f"gradient of {name}"
        if not lay.is_split:
            assert all(relative_error(part, full) < BOUND for part in parts), f"gradient of {name}"


def splittable(dims: Dims, tp: int) -> list[set[Factor]]:
    """What the rules leave free, in the order of the values: factors, each to be split alone."""
    every = [f for own in dims.of.values() for dim in own for f in atoms(dim)]
    free = [f for f in dict.fromkeys(every) if not f.blocked and f.size >= tp]
    refused = refused_factors(dims)
    return [{f} for f in free if f not in refused]


@pytest.mark.parametrize("op", OPS)
@settings(max_examples=12)
@given(data=st.data())
def test_every_split_that_a_rule_allows_gives_the_whole_result(
    op: str, data: st.DataObject
) -> None:
    torch.manual_seed(data.draw(st.integers(0, 1000)))

    def pick(low: int, high: int) -> int:
        return data.draw(st.integers(low, high))

    call = picked(op, pick)
    graph, values = build(op, call, draw_cuts(call, pick))
    tp = data.draw(st.sampled_from([2, 3]))
    dims = propagate(graph)
    for factor in splittable(dims, tp):
        check(graph, values, sharding_of(dims, factor, tp))


def test_every_row_is_tried() -> None:
    untried = {op for op, row in ROWS.items() if not isinstance(row, Whole)} - set(OPS)
    assert not untried, "add a case to tests/passes/rule_cases.py"


def test_what_is_kept_whole_says_why() -> None:
    for op, row in ROWS.items():
        if isinstance(row, Whole):
            assert len(row.why.split()) > 3
            assert callable(resolve_op(op))


@pytest.mark.parametrize(
    ("op", "parts"),
    [
        ("aten.linear.default", 4),  # two dims of samples, columns, rows
        ("aten.mm.default", 3),
        ("merakc.attention.default", 5),  # samples, key heads, their queries, rows, values' width
        ("aten.embedding.default", 4),
        ("aten.cross_entropy_loss.default", 2),
        ("aten.batch_norm.default", 1),
        ("aten.layer_norm.default", 2),
        ("aten.softmax.int", 3),  # and its result is cut
        ("aten.sum.dim_IntList", 3),
        ("aten.mean.dim", 3),
        ("aten.linalg_vector_norm.default", 0),
    ],
)
def test_rules_leave_free_what_can_be_split(op: str, parts: int) -> None:
    largest = picked(op, lambda low, high: high)
    graph, _ = build(op, largest)
    assert len(splittable(propagate(graph), 2)) == parts


def test_ops_without_a_row_are_found_by_torchs_tags() -> None:
    assert row_of("aten.gelu.default") == "pointwise"
    assert row_of("aten.renorm.default") is None
    assert row_of("aten.bernoulli.default") is None  # random: each rank would draw alike
    assert row_of("merakc.unknown.default") is None
