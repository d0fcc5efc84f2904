"""Every row of the table: the op on each rank's part gives the parts of the op on the whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from merakc.ir.graph import Graph, Input, InputKind, Node, Output, OutputKind, Ref, TensorSpec
from merakc.kernels.ops import resolve_op
from merakc.passes.choose import uneven_factors
from merakc.passes.dims import Dims
from merakc.passes.factors import Factor, atoms
from merakc.passes.interpret import interpret
from merakc.passes.localise import localise
from merakc.passes.propagate import propagate
from merakc.passes.rules import ROWS, row_of
from merakc.passes.shard import sharding_of
from merakc.passes.sharding import Sharding
from tests.passes.lockstep import in_lockstep, relative_error

Pick = Callable[[int, int], int]
Call = tuple[Any, ...]
BOUND = 1e-12
KEYS = torch.tensor(3), torch.tensor(40)  # of random numbers: the seed and the first sample


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def _picked(op: str, pick: Pick) -> Call:
    """Arguments of one call; tensors of numbers are real ones."""
    b, m, n, i = (pick(2, 7) for _ in range(4))
    if op in REDUCTIONS:
        return (randn(b, m, n), *REDUCTIONS[op](pick))
    return CALLS[op](pick, b, m, n, i)


REDUCTIONS: dict[str, Callable[[Pick], Call]] = {
    "aten.sum.default": lambda pick: (),
    "aten.sum.dim_IntList": lambda pick: ((pick(0, 1), -1), bool(pick(0, 1))),
    "aten.mean.default": lambda pick: (),
    "aten.mean.dim": lambda pick: ((pick(0, 2),), bool(pick(0, 1))),
    "aten.amax.default": lambda pick: ((pick(0, 2),), bool(pick(0, 1))),
    "aten.amin.default": lambda pick: ((pick(0, 2),), bool(pick(0, 1))),
    "aten.var_mean.correction": lambda pick: ((pick(0, 2),),),
    "aten.var.correction": lambda pick: ((pick(0, 2),),),
    "aten.max.dim": lambda pick: (pick(0, 2), bool(pick(0, 1))),
    "aten.logsumexp.default": lambda pick: ((pick(0, 2),), bool(pick(0, 1))),
    "aten.argmax.default": lambda pick: (pick(0, 2), bool(pick(0, 1))),
    "aten.argmin.default": lambda pick: (pick(0, 2), bool(pick(0, 1))),
    "aten.softmax.int": lambda pick: (pick(-3, 2),),
    "aten.log_softmax.int": lambda pick: (pick(-3, 2),),
    "aten.cumsum.default": lambda pick: (pick(0, 2),),
    "aten.sort.default": lambda pick: (pick(0, 2),),
    "aten.flip.default": lambda pick: ((0, pick(1, 2)),),
    "aten.linalg_vector_norm.default": lambda pick: (),
    "aten.transpose.int": lambda pick: (pick(0, 2), pick(-3, -1)),
    "aten.permute.default": lambda pick: ((2, 0, 1),),
    "aten.unsqueeze.default": lambda pick: (pick(-4, 3),),
    "aten.unbind.int": lambda pick: (pick(0, 2),),
    "aten.select.int": lambda pick: (pick(-3, 2), pick(0, 1)),
    "aten.slice.Tensor": lambda pick: (pick(0, 2), 1, 9),
    "aten.constant_pad_nd.default": lambda pick: ((1, pick(-1, 2)), 0.5),
    "aten.new_ones.default": lambda pick: ((4, pick(2, 6)),),
    "aten.new_zeros.default": lambda pick: ((pick(2, 6),),),
    "aten.new_full.default": lambda pick: ((pick(2, 6),), 2.5),
    "aten.to.dtype": lambda pick: (torch.float64,),
    "aten.contiguous.default": lambda pick: (),
    "aten.clone.default": lambda pick: (),
    "aten.detach.default": lambda pick: (),
    "aten.alias.default": lambda pick: (),
    "aten.fill.Scalar": lambda pick: (2.0,),
    "aten.full_like.default": lambda pick: (2.0,),
    "aten.zeros_like.default": lambda pick: (),
    "aten.ones_like.default": lambda pick: (),
    # elementwise, without a row
    "aten.gelu.default": lambda pick: (),
    "aten.pow.Tensor_Scalar": lambda pick: (2,),
}  # fmt: skip


def _heads(pick: Pick) -> tuple[int, int, int]:
    groups = pick(1, 4)
    return groups * pick(1, 3), groups, 2 * pick(1, 2)


def _attention(pick: Pick, b: int, m: int, n: int, i: int) -> Call:
    heads, groups, width = _heads(pick)
    mask = torch.rand(b, 1, m, n) > 0.2 if pick(0, 1) else None
    q, k, v = randn(b, heads, m, width), randn(b, groups, n, width), randn(b, groups, n, i)
    return q, k, v, mask, False, 0.7


def _embedding(pick: Pick, b: int, m: int, n: int, i: int) -> Call:
    return randn(m, i), torch.randint(m, (b, n)), pick(-1, m - 1)


def _cross_entropy(pick: Pick, b: int, m: int, n: int, i: int) -> Call:
    target = torch.randint(m, (b + 1,))
    target[0] = -100
    return randn(b + 1, m), target, None, pick(0, 2), -100, pick(0, 1) * 0.1


def _convolution(pick: Pick, b: int, m: int, n: int, i: int) -> Call:
    groups = pick(1, 2)
    bias = randn(groups * n) if pick(0, 1) else None
    x, w = randn(b, groups * i, 6), randn(groups * n, i, 3)
    return x, w, bias, (1,), (1,), (1,), False, (0,), groups


def _reshape(pick: Pick, b: int, m: int, n: int, i: int) -> Call:
    x = randn(b, m, n, i)
    shapes = [(b * m, n * i), (b, m * n, i), (b * m * n * i,), (b, m * n * i), (b, n, m, i)]
    return x, shapes[pick(0, len(shapes) - 1)]


CALLS: dict[str, Callable[[Pick, int, int, int, int], Call]] = {
    "aten.linear.default": lambda pick, b, m, n, i: (
        randn(b, m, i), randn(n, i), randn(n) if pick(0, 1) else None),
    "aten.addmm.default": lambda pick, b, m, n, i: (
        randn(n) if pick(0, 1) else randn(1, n), randn(m, i), randn(i, n)),
    "aten.mm.default": lambda pick, b, m, n, i: (randn(m, i), randn(i, n)),
    "aten.bmm.default": lambda pick, b, m, n, i: (randn(b, m, i), randn(b, i, n)),
    "aten.baddbmm.default": lambda pick, b, m, n, i: (
        randn(b, m, n), randn(b, m, i), randn(b, i, n)),
    "aten.matmul.default": lambda pick, b, m, n, i: (
        randn(b, pick(1, 1), m, i), randn(*((3,) if pick(0, 1) else (b, 3)), i, n)),
    "merakc.attention.default": _attention,
    "aten.convolution.default": _convolution,
    "aten.embedding.default": _embedding,
    "aten.cross_entropy_loss.default": _cross_entropy,
    "aten.layer_norm.default": lambda pick, b, m, n, i: (
        randn(b, m, n), (n,), randn(n), randn(n) if pick(0, 1) else None),
    "aten.rms_norm.default": lambda pick, b, m, n, i: (randn(b, m, n), (n,), randn(n), 1e-5),
    "aten.batch_norm.default": lambda pick, b, m, n, i: (
        randn(b, m, n), randn(m), randn(m), None, None, True, 0.1, 1e-5, False),
    "aten.reshape.default": _reshape,
    "aten.expand.default": lambda pick, b, m, n, i: (randn(m, 1, n), (b, m, i, n)),
    "aten.t.default": lambda pick, b, m, n, i: (randn(m, n),),
    "aten.squeeze.dim": lambda pick, b, m, n, i: (randn(b, 1, m), pick(0, 1)),
    "aten.squeeze.dims": lambda pick, b, m, n, i: (randn(b, 1, m, 1), (1, -1)),
    "aten.squeeze.default": lambda pick, b, m, n, i: (randn(b, 1, m),),
    "aten.split.Tensor": lambda pick, b, m, n, i: (randn(b, i * m), m, 1),
    "aten.split_with_sizes.default": lambda pick, b, m, n, i: (
        randn(b, m + n, i), (m, n), 1),
    "aten.cat.default": lambda pick, b, m, n, i: ((randn(b, m, i), randn(b, n, i)), 1),
    "aten.stack.default": lambda pick, b, m, n, i: ((randn(m, n), randn(m, n)), pick(0, 2)),
    "aten.slice_scatter.default": lambda pick, b, m, n, i: (
        randn(b, m, n), randn(b, m - 1, n), 1, 1, m),
    "aten.index.Tensor": lambda pick, b, m, n, i: (
        randn(m, n, i), (torch.randint(m, (b, 2)),)),
    "aten.arange.default": lambda pick, b, m, n, i: (m,),
    "aten.arange.start": lambda pick, b, m, n, i: (2, 2 + m),
    "aten.arange.start_step": lambda pick, b, m, n, i: (0, 2 * m, 2),
    "aten.full.default": lambda pick, b, m, n, i: ((m, n), 1.5),
    "aten.zeros.default": lambda pick, b, m, n, i: ((m, n),),
    "aten.ones.default": lambda pick, b, m, n, i: ((m, n),),
    "aten.scalar_tensor.default": lambda pick, b, m, n, i: (1.5,),
    "aten.to.dtype_layout": lambda pick, b, m, n, i: (randn(m, n),),
    "aten.to.device": lambda pick, b, m, n, i: (randn(m, n), torch.device("cpu"), torch.float64),
    "aten.to.other": lambda pick, b, m, n, i: (randn(m, n), randn(1)),
    "aten.fill.Tensor": lambda pick, b, m, n, i: (randn(m, n), randn(1).reshape(())),
    "aten.empty_like.default": lambda pick, b, m, n, i: (randn(m, n),),
    "aten.masked_fill.Scalar": lambda pick, b, m, n, i: (
        randn(b, m, n), torch.rand(m, n) > 0.5, 0.5),
    "aten.masked_fill.Tensor": lambda pick, b, m, n, i: (
        randn(b, m, n), torch.rand(b, 1, n) > 0.5, randn(1).reshape(())),
    "merakc.dropout.default": lambda pick, b, m, n, i: (
        randn(b, m, n), *KEYS, 0.5, 1, 1, (b, m, n), (0, 0, 0), (b, m, n)),
    "merakc.uniform.default": lambda pick, b, m, n, i: (
        *KEYS, 1, 1, (b, m, n), (0, 0, 0), (b, m, n), (b, m, n), torch.float64),
    "merakc.normal.default": lambda pick, b, m, n, i: (
        *KEYS, 1, 0, (1, m * n), (0, 0), (1, m * n), (m, n), torch.float64),
    # elementwise, without a row
    "aten.mul.Tensor": lambda pick, b, m, n, i: (randn(b, 1, n), randn(m, 1)),
    "aten.where.self": lambda pick, b, m, n, i: (
        torch.rand(m, n) > 0.5, randn(b, m, n), randn(1, n)),
}  # fmt: skip
OPS = sorted({*CALLS, *REDUCTIONS})
# The values are undefined; the shapes are not.
WITHOUT_VALUES = ("aten.empty_like.default",)


def build(op: str, call: Call) -> tuple[Graph, dict[str, Tensor]]:
    """A graph of one node, and the values of its inputs."""
    values: dict[str, Tensor] = {}

    def lift(arg: Any) -> Any:
        if isinstance(arg, tuple):
            return tuple(map(lift, arg))
        if isinstance(arg, Tensor):
            name = f"x{len(values)}"
            values[name] = arg
            return Ref(name)
        return arg

    args = lift(call)
    out = resolve_op(op)(*call)
    outs = out if isinstance(out, (tuple, list)) else (out,)
    specs = tuple(TensorSpec(tuple(o.shape), o.dtype) for o in outs)
    inputs = tuple(
        Input(n, InputKind.PARAMETER, TensorSpec(tuple(v.shape), v.dtype), n, v.is_floating_point())
        for n, v in values.items()
    )
    node = Node("y", op, args, (), specs, source="model.py:1")
    outputs = tuple(Output(f"y{k}", OutputKind.LOSS, Ref("y", k)) for k in range(len(outs)))
    return Graph(inputs, (node,), outputs), values


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
        torch.randn(spec.shape).to(torch.float64) for spec in graph.nodes[0].outputs if spec
    ]
    wanted, wanted_grads = run(graph, values, tangents)
    lays = [sharding.layouts[Ref("y", k)] for k in range(len(wanted))]

    def rank(r: int) -> tuple[list[Tensor], dict[str, Tensor]]:
        own = {n: sharding.layouts[Ref(n)].take(v, tp, r) for n, v in values.items()}
        seeds = [lay.take(t, tp, r) for lay, t in zip(lays, tangents, strict=True)]
        return run(localise(graph, sharding, r), own, seeds)

    ranks = in_lockstep(tp, rank)
    for k, full in enumerate(wanted):
        found = lays[k].join([outs[k] for outs, _ in ranks])
        assert found.shape == full.shape
        if graph.nodes[0].op not in WITHOUT_VALUES:
            assert relative_error(found.double(), full.double()) < BOUND, f"output {k}"
    for name, full in wanted_grads.items():
        lay = sharding.layouts[Ref(name)]
        parts = [grads[name] for _, grads in ranks]
        assert relative_error(lay.join(parts), full) < BOUND, f"gradient of {name}"
        if not lay.is_split:
            assert all(relative_error(part, full) < BOUND for part in parts), f"gradient of {name}"


def splittable(dims: Dims, tp: int) -> list[Factor]:
    """The factors that the rule leaves free, in the order of the values."""
    every = [f for own in dims.of.values() for dim in own for f in atoms(dim)]
    free = [f for f in dict.fromkeys(every) if not f.blocked and f.size >= tp]
    return [f for f in free if f not in uneven_factors(dims)]


@pytest.mark.parametrize("op", OPS)
@settings(max_examples=12)
@given(data=st.data())
def test_every_split_that_a_rule_allows_gives_the_whole_result(
    op: str, data: st.DataObject
) -> None:
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    graph, values = build(op, _picked(op, lambda low, high: data.draw(st.integers(low, high))))
    tp = data.draw(st.sampled_from([2, 3]))
    dims = propagate(graph)
    for factor in splittable(dims, tp):
        check(graph, values, sharding_of(dims, {factor}, tp))


def test_every_row_is_tried() -> None:
    assert set(ROWS) <= set(OPS)


@pytest.mark.parametrize(
    ("op", "parts"),
    [
        ("aten.linear.default", 4),  # two dims of samples, columns, rows
        ("aten.mm.default", 3),
        ("merakc.attention.default", 4),  # samples, key heads, their queries, the values' width
        ("aten.embedding.default", 4),
        ("aten.cross_entropy_loss.default", 1),
        ("aten.batch_norm.default", 1),
        ("aten.layer_norm.default", 2),
        ("aten.softmax.int", 2),
        ("aten.sum.dim_IntList", 3),
        ("aten.mean.dim", 2),
        ("aten.linalg_vector_norm.default", 0),
    ],
)
def test_rules_leave_free_what_can_be_split(op: str, parts: int) -> None:
    largest = _picked(op, lambda low, high: high)
    graph, _ = build(op, largest)
    assert len(splittable(propagate(graph), 2)) == parts


def test_ops_without_a_row_are_found_by_torchs_tags() -> None:
    assert row_of("aten.gelu.default") == "pointwise"
    assert row_of("aten.topk.default") is None
    assert row_of("merakc.unknown.default") is None
