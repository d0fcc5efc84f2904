"""From parts of one dim to parts of another: which nodes, and what they compute."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.ranks import run_ranks
from merakc.ir.graph import Graph, Input, InputKind, Node, Output, OutputKind, Ref, TensorSpec
from merakc.ir.layout import parse_layout
from merakc.kernels.collectives import bind_axis, unbind_axes
from merakc.passes.autodiff.interpret import interpret
from merakc.passes.sharding.sequences.exchange import (
    before_repeats,
    can_exchange,
    can_open,
    exchange_nodes,
    scatter_nodes,
)

FLOAT = torch.float64


@pytest.mark.parametrize(
    ("source", "target", "possible"),
    [
        ("2 x 4 x 7*", "2 x 4* x 7", True),
        ("2 x 4 x 3·5*", "2 x 2·4*·3 x 15", True),
        ("2 x 4 x 7*", "2 x 4 x 7*", False),
        ("2 x 4* x 7*", "2* x 4 x 7", False),
        ("2 x 4 x 7*", "2 x (4*+4*) x 7", False),
        ("2 x 4 x 7", "2 x 4* x 7", False),
        ("2 x 4 x 6*", "2 x 2*·2* x 6", False),
    ],
)
def test_one_factor_for_another_of_another_dim(source: str, target: str, possible: bool) -> None:
    assert can_exchange(parse_layout(source), parse_layout(target)) is possible


@pytest.mark.parametrize("text", ["2 x 2·4* x 7", "2·3*·5 x 7", "3 x 2·3*"])
def test_parts_of_each_block_of_a_dim_are_scattered_as_a_layout_says(text: str) -> None:
    lay = parse_layout(text)
    (dim,) = (k for k, own in enumerate(lay.dims) if any(f.split for f in own))
    assert can_open(lay, dim)
    whole = torch.arange(lay.numel, dtype=FLOAT).view(lay.shape)
    for rank in range(2):
        spec = TensorSpec(lay.shape, FLOAT)
        opened, scatter, back = scatter_nodes(Ref("x"), "y", spec, lay, dim, ("cp", 2, rank))
        _, axis, at, sizes, own = scatter.args
        assert (axis, own, back.name, back.spec.shape) == (
            "cp",
            rank,
            "y",
            lay.local_shape(2, rank),
        )
        part = whole.view(opened.args[1]).split(list(sizes), at)[rank]
        assert part.shape == scatter.spec.shape
        assert torch.equal(part.reshape(back.args[1]), lay.take(whole, 2, rank))


@pytest.mark.parametrize("text", ["4* x 7", "2·(3*+3*) x 7", "2*·2*", "2·4"])
def test_other_dims_are_put_in_order(text: str) -> None:
    assert not can_open(parse_layout(text), 0)


def _exchanged(source: str, target: str) -> bool:
    """Whether a rank gets its part of `target` from its part of `source`, and back."""
    assert dist.group.WORLD is not None
    rank, ranks = dist.get_rank(), dist.get_world_size()
    bind_axis("cp", dist.group.WORLD)
    layouts = parse_layout(source), parse_layout(target)
    whole = torch.arange(layouts[0].numel, dtype=FLOAT).view(layouts[0].shape)
    equal = True
    for one, other in (layouts, layouts[::-1]):
        part = one.take(whole, ranks, rank)
        nodes = exchange_nodes(Ref("x"), "y", FLOAT, (one, other), ("cp", ranks, rank))
        given = Input("x", InputKind.ACTIVATION, TensorSpec(tuple(part.shape), FLOAT))
        graph = Graph((given,), tuple(nodes), (Output("y", OutputKind.RESULT, Ref("y")),))
        graph.verify()
        (found,) = interpret(graph, {"x": part})
        assert isinstance(found, Tensor)
        equal &= torch.equal(found, other.take(whole, ranks, rank))
        equal &= graph.nodes[-1].spec.shape == tuple(found.shape)
    unbind_axes()
    return equal


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("2 x 4 x 7*", "2 x 4* x 7"),
        ("2 x 12 x 6*", "2 x 2·2*·3 x 6"),  # heads of two tp ranks, with three queries each
        ("2·6* x 5", "12 x 5*"),  # samples and rows in one dim
        ("3·4* x 6", "12 x 3·2*"),
    ],
)
def test_parts_become_those_of_the_other_dim(source: str, target: str) -> None:
    assert all(run_ranks(2, partial(_exchanged, source, target)))


def test_what_is_repeated_is_found() -> None:
    spec = TensorSpec((2, 3), FLOAT)
    opened = Node("a", "aten.unsqueeze.default", (Ref("x"), 1), (), (spec,))
    larger = Node("b", "aten.expand.default", (Ref("a"), (2, 4, 3)), (), (spec,))
    makers = {"a": opened, "b": larger}
    assert before_repeats(Ref("b"), makers) == (Ref("x"), [larger, opened])
    assert before_repeats(Ref("x"), makers) == (Ref("x"), [])
