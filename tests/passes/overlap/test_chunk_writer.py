"""Parts of graphs in chunks of rows: what is cut, joined and drawn."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from merakc.ir.graph import Graph, Input, InputKind, Node, Output, OutputKind, Ref, TensorSpec
from merakc.ir.layout import Layout, parse_layout
from merakc.passes.autodiff.interpret import interpret
from merakc.passes.overlap.chunk_writer import Region, draws_apart, write_chunks

FLOATS, INTS = torch.float64, torch.int64


def drop(lay: Layout, sample: int, sizes: Sequence[int], starts: Sequence[int] = (),
         local: Sequence[int] = ()) -> Graph:  # fmt: skip
    """A value, the same with some of it dropped, and the two added up outside of the region."""
    spec, number = TensorSpec(lay.shape, FLOATS), TensorSpec((), INTS)
    block = sample, tuple(sizes), tuple(starts) or (0,) * len(sizes), tuple(local) or tuple(sizes)
    args = Ref("x"), Ref("seed"), Ref("first"), 0.5, 3, *block
    return Graph(
        (
            Input("x", InputKind.ACTIVATION, spec),
            Input("seed", InputKind.SCALAR, number),
            Input("first", InputKind.SCALAR, number),
        ),
        (
            Node("drop", "merakc.dropout.default", args, (), (spec,)),
            Node("neg", "aten.neg.default", (Ref("drop"),), (), (spec,)),
            Node("sum", "aten.add.Tensor", (Ref("neg"), Ref("drop")), (("alpha", 3.0),), (spec,)),
        ),
        (Output("sum", OutputKind.ACTIVATION, Ref("sum")),),
    )


def whole(shape: Sequence[int]) -> Layout:
    return Layout(tuple(parse_layout(str(n)).dims[0] for n in shape))


def chunked(graph: Graph, lay: Layout, count: int) -> Graph:
    plain = whole(())
    layouts = {Ref("x"): lay, Ref("drop"): lay, Ref("neg"): lay}
    layouts |= {Ref("seed"): plain, Ref("first"): plain}
    return write_chunks(graph, [Region(count, frozenset({"drop", "neg"}), layouts)])


def run(graph: Graph, shape: Sequence[int]) -> torch.Tensor:
    x = torch.arange(1.0, 1.0 + torch.Size(shape).numel(), dtype=FLOATS).reshape(tuple(shape))
    (found,) = interpret(graph, {"x": x, "seed": torch.tensor(5), "first": torch.tensor(9)})
    return found


DRAWS = [
    # rows of one sample, of which the array is one; the array is part of a larger one
    ("1 x 6* x 4", 0, (1, 24), (), ()),
    ("1 x 6* x 4", 0, (1, 12, 4), (0, 3, 0), (1, 6, 4)),
    ("1 x 6* x 4", 0, (1, 12, 8), (0, 3, 4), (1, 6, 4)),
    # rows of several samples, and several samples as rows
    ("3 x 6* x 4", 0, (3, 24), (), ()),
    ("3 x 6* x 4", 0, (3, 6, 4), (), ()),
    ("3·6* x 4", 0, (3, 24), (), ()),
    ("3* x 6 x 4", 0, (3, 24), (), ()),
    ("3* x 6 x 4", -1, (72,), (), ()),
    ("2 x 3* x 4", 1, (2, 3, 4), (), ()),
    # what is outside and inside of the rows in their dim: all ranks' parts, and heads
    ("1 x 2·6* x 4", 0, (1, 48), (), ()),
    ("1 x 2·6*·3 x 4", 0, (1, 36, 4), (), ()),
]


@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize(("text", "sample", "sizes", "starts", "local"), DRAWS)
def test_chunks_give_what_the_whole_gives(
    text: str, sample: int, sizes: tuple[int, ...], starts: tuple[int, ...], local: tuple[int, ...],
    count: int,
) -> None:  # fmt: skip
    lay = parse_layout(text)
    count = min(count, next(f.size for dim in lay.dims for f in dim if f.split))
    graph = drop(lay, sample, sizes, starts, local)
    made = chunked(graph, lay, count)
    assert [n.name for n in made.nodes if n.op == "merakc.dropout.default"] == [
        f"drop#{j}" for j in range(count)
    ]
    assert torch.equal(run(made, lay.shape), run(graph, lay.shape))


def test_draws_of_which_chunks_are_no_blocks_are_told() -> None:
    lay = parse_layout("2·6* x 4")  # rows inside of what is a part of a larger array already
    assert not draws_apart(drop(lay, -1, (24, 4), (6, 0), (12, 4)).nodes[0], lay)
    samples = parse_layout("2·3* x 4")  # or inside of samples
    assert not draws_apart(drop(samples, 0, (6, 4)).nodes[0], samples)
    across = parse_layout("6* x 4")  # or that dims of the array cut
    assert not draws_apart(drop(across, -1, (4, 6)).nodes[0], across)
    assert draws_apart(drop(lay, -1, (48,)).nodes[1], lay)


def test_other_values_are_read_as_they_are_and_results_of_several_are_joined_apart() -> None:
    lay = parse_layout("6* x 4")
    x, w = TensorSpec((6, 4), FLOATS), TensorSpec((4,), FLOATS)
    halves = TensorSpec((6, 2), FLOATS)
    graph = Graph(
        (Input("x", InputKind.ACTIVATION, x), Input("w", InputKind.PARAMETER, w)),
        (
            Node("scaled", "aten.mul.Tensor", (Ref("x"), Ref("w")), (), (x,)),
            Node("split", "aten.split.Tensor", (Ref("scaled"), 2, 1), (), (halves, halves)),
            Node("b", "aten.neg.default", (Ref("split", 1),), (), (halves,)),
        ),
        (Output("b", OutputKind.ACTIVATION, Ref("b")), Output("x", OutputKind.RESULT, Ref("x"))),
    )
    half = parse_layout("6* x 2")
    layouts = {Ref("x"): lay, Ref("w"): whole((4,)), Ref("scaled"): lay}
    layouts |= {Ref("split", k): half for k in (0, 1)}
    made = write_chunks(graph, [Region(2, frozenset({"scaled", "split"}), layouts)])
    assert [n.name for n in made.nodes] == [
        "x.0#cut0", "scaled#0", "split#0", "scaled#1", "split#1", "split.1#joined", "b",
    ]  # fmt: skip
    given = {"x": torch.rand(6, 4, dtype=FLOATS), "w": torch.rand(4, dtype=FLOATS)}
    for found, wanted in zip(interpret(made, given), interpret(graph, given), strict=True):
        assert torch.equal(found, wanted)
